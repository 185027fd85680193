"""Turns staged Parquet files into Iceberg's data files, trusting only their footers.

The footer of every file is read before anything refers to it: a file that is missing,
torn or not what the cut says never reaches a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from zombi_platform.cuts import StagedFile
from zombi_platform.errors import CorruptionError
from zombi_platform.lake.schema import SORT_ORDER_ID, TABLE_SCHEMA, our_spec
from zombi_platform.lake.storage import Storage

READERS: Final = 16
"""Footers read at once; each is one or two small requests."""


def read_data_files(
    storage: Storage, metadata: TableMetadata, staged: Sequence[StagedFile]
) -> list[DataFile]:
    """Check every file against its record and describe it for a manifest."""
    plan = compute_statistics_plan(TABLE_SCHEMA, metadata.properties)
    ids = parquet_path_to_id_mapping(TABLE_SCHEMA)
    spec_id = our_spec(metadata).spec_id

    def describe(file: StagedFile) -> DataFile:
        footer = _read_footer(storage, file)
        statistics = data_file_statistics_from_parquet_metadata(footer, plan, ids)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=Record(file.hour // 24, file.hour % 24),
            file_size_in_bytes=file.bytes,
            sort_order_id=SORT_ORDER_ID,
            spec_id=spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    if len(staged) == 1:
        return [describe(staged[0])]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(describe, staged))


def _read_footer(storage: Storage, file: StagedFile) -> pq.FileMetaData:
    with storage.errors(file.path):
        try:
            with storage.filesystem().open_input_file(storage.path(file.path)) as source:
                size = source.size()
                footer = pq.read_metadata(source)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{file.path} was written and is gone: somebody deleted it. Its events are still "
                "where they came from"
            ) from error
    found = {"bytes": size, "events": footer.num_rows, **_bounds(footer)}
    expected = {
        "bytes": file.bytes,
        "events": file.events,
        "sequence": (file.first, file.last),
        "partition": (file.partition, file.partition),
        "event_hour": (file.hour % 24, file.hour % 24),
    }
    if found != expected:
        raise CorruptionError(f"{file.path} is not what was staged: {found}, not {expected}")
    return footer


def _bounds(footer: pq.FileMetaData) -> dict[str, tuple[Any, Any]]:
    """Lowest and highest value of the columns that a staged file is recorded with."""
    wanted = {"sequence", "partition", "event_hour"}
    columns = [
        index for index in range(footer.num_columns) if footer.schema.column(index).path in wanted
    ]
    bounds = {}
    for index in columns:
        statistics = [
            footer.row_group(group).column(index).statistics
            for group in range(footer.num_row_groups)
        ]
        bounds[footer.schema.column(index).path] = (
            min(each.min for each in statistics),
            max(each.max for each in statistics),
        )
    return bounds
