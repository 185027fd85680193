"""The columns of a data file in Arrow, with the field ids that Iceberg's readers look for.

Apart from `schema.py` because Spark's workers need this and must not wait for pyiceberg.
Field ids never change once tables exist.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

SORT_COLUMNS: Final = ("timestamp_ms", "sequence")
"""Time first; the sequence decides between events of one millisecond."""


def _field(field_id: int, name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    return pa.field(
        name, kind, nullable=nullable, metadata={b"PARQUET:field_id": str(field_id).encode()}
    )


FILE_SCHEMA: Final = pa.schema(
    [
        _field(1, "sequence", pa.int64()),
        _field(2, "topic", pa.string()),
        _field(3, "partition", pa.int64()),
        _field(4, "payload", pa.large_binary()),
        _field(5, "timestamp_ms", pa.int64()),
        _field(6, "idempotency_key", pa.string(), nullable=True),
        _field(7, "event_date", pa.date32()),
        _field(8, "event_hour", pa.int32()),
        _field(
            9,
            "headers",
            pa.map_(
                _field(10, "key", pa.string()), _field(11, "value", pa.string(), nullable=True)
            ),
            nullable=True,
        ),
    ]
)
"""Columns of a data file. `partition` is wider than the original's int, which a u32
does not fit; `topic` is the table's name."""
