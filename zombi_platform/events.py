"""Columns, names and ranges of events: pure values shared by every stage.

Keeps INV-9: a table name that passed `check_table` is safe in a RocksDB key, a URL and
an object-store path. Nothing here does I/O.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from zombi_platform.errors import InvalidRequestError

TABLE_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,127}", re.ASCII)
TABLE_NAME_PATTERN: Final = "^[a-zA-Z][a-zA-Z0-9_-]{0,127}$"

PARTITION_MAX: Final = 2**32 - 1
SEQUENCE_MAX: Final = 2**63 - 1
TIMESTAMP_MS_MIN: Final = 0
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the last millisecond a date column can hold everywhere."""

IDEMPOTENCY_KEY_BYTES_MAX: Final = 1024
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 16 * 1024

HEADERS_TYPE: Final = pa.map_(pa.string(), pa.string())

COLUMNS: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("partition", pa.int64(), nullable=False),
        pa.field("payload", pa.large_binary(), nullable=False),
        pa.field("timestamp_ms", pa.int64(), nullable=False),
        pa.field("idempotency_key", pa.string()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
"""What the hot buffer gives out. The partition is a u32, which only int64 holds in Arrow
types that every engine reads; payloads of one batch may pass 2 GiB, hence large_binary."""


def check_table(name: str) -> str:
    """Return the name if it is a valid table name, else raise."""
    if TABLE_NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"invalid table name {name[:140]!r}: it must match {TABLE_NAME_PATTERN}",
            code="INVALID_TABLE_NAME",
        )
    return name


def check_partition(partition: int) -> int:
    """Return the partition if it fits an unsigned 32-bit integer, else raise."""
    if not 0 <= partition <= PARTITION_MAX:
        raise InvalidRequestError(
            f"partition {partition} is out of range: it must be 0 to {PARTITION_MAX}",
            code="INVALID_PARTITION",
        )
    return partition
