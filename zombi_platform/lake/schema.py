"""What every table looks like: columns, partition spec, sort order, properties.

Field ids never change once tables exist. `columns.FILE_SCHEMA` is the same in Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    NestedField,
    StringType,
)

from zombi_platform.errors import LakeConflictError
from zombi_platform.lake.columns import SORT_COLUMNS

SORT_ORDER_ID: Final = 1
METADATA_KEPT: Final = 100
"""Older metadata files that a table's metadata still names."""

PROPERTIES: Final[Mapping[str, str]] = {
    "format-version": "2",
    # Nobody else's clean-up may delete files that our tombstones look after.
    "gc.enabled": "false",
    "write.format.default": "parquet",
    "write.parquet.compression-codec": "zstd",
    "write.parquet.bloom-filter-enabled.column.idempotency_key": "true",
    "write.metadata.previous-versions-max": str(METADATA_KEPT),
    "write.distribution-mode": "none",
    # Headers are a bag of short strings whose bounds help nobody.
    "write.metadata.metrics.column.headers.key": "counts",
    "write.metadata.metrics.column.headers.value": "counts",
}


HEADERS: Final = MapType(
    key_id=10, key_type=StringType(), value_id=11, value_type=StringType(), value_required=False
)

TABLE_SCHEMA: Final = Schema(
    NestedField(1, "sequence", LongType(), required=True),
    NestedField(2, "topic", StringType(), required=True),
    NestedField(3, "partition", LongType(), required=True),
    NestedField(4, "payload", BinaryType(), required=True),
    NestedField(5, "timestamp_ms", LongType(), required=True),
    NestedField(6, "idempotency_key", StringType(), required=False),
    NestedField(7, "event_date", DateType(), required=True),
    NestedField(8, "event_hour", IntegerType(), required=True),
    NestedField(9, "headers", HEADERS, required=False),
)

PARTITION_SPEC: Final = PartitionSpec(
    PartitionField(7, 1000, IdentityTransform(), "event_date"),
    PartitionField(8, 1001, IdentityTransform(), "event_hour"),
)


def our_spec(metadata: TableMetadata) -> PartitionSpec:
    """The spec that files are written with here: ours, whatever others made the default."""
    for spec in metadata.specs().values():
        if spec.fields == PARTITION_SPEC.fields:
            return spec
    raise LakeConflictError(
        f"the table at {metadata.location} has no partition spec {PARTITION_SPEC.fields} any more: "
        "somebody removed it. Add it again",
        code="SPEC_REMOVED",
    )


SORT_ORDER: Final = SortOrder(
    *(
        SortField(
            TABLE_SCHEMA.find_field(name).field_id,
            IdentityTransform(),
            SortDirection.ASC,
            NullOrder.NULLS_FIRST,
        )
        for name in SORT_COLUMNS
    ),
    order_id=SORT_ORDER_ID,
)
