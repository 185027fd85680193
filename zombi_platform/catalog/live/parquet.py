"""A live block as a Parquet file in memory: hot rows with the columns of a data file.

Rows stay in the order of their sequences and one file holds all hours, since a block lives
for minutes; its bounds let readers skip it. Rows are checked to be exactly the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from zombi_platform.cuts import Range
from zombi_platform.errors import CorruptionError
from zombi_platform.lake.columns import FILE_SCHEMA

HOUR_MS: Final = 3_600_000
HOURS_PER_DAY: Final = pa.scalar(24, pa.int32())
REPEATING: Final = ["topic", "partition", "event_date", "event_hour"]


def write_block(table: str, ranges: Sequence[Range], rows: pa.Table) -> pa.Buffer:
    """The file, once the rows have proved to be every sequence of the ranges, in order."""
    _check(ranges, rows)
    sink = pa.BufferOutputStream()
    pq.write_table(
        _file_columns(table, rows),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=REPEATING,
        store_schema=False,
    )
    return sink.getvalue()


def _check(ranges: Sequence[Range], rows: pa.Table) -> None:
    sequences = np.concatenate([np.arange(part.first, part.last + 1) for part in ranges])
    partitions = np.repeat([part.partition for part in ranges], [part.events for part in ranges])
    if not (
        np.array_equal(rows["sequence"].to_numpy(), sequences)
        and np.array_equal(rows["partition"].to_numpy(), partitions)
    ):
        raise CorruptionError(f"the rows of a live block are not those of {list(ranges)[:5]}")


def _file_columns(table: str, rows: pa.Table) -> pa.Table:
    hours = pc.cast(pc.divide(rows["timestamp_ms"], HOUR_MS), pa.int32())
    days = pc.divide(hours, HOURS_PER_DAY)
    made = {
        "topic": pa.repeat(pa.scalar(table, pa.string()), rows.num_rows),
        "event_date": pc.cast(days, pa.date32()),
        "event_hour": pc.subtract(hours, pc.multiply(days, HOURS_PER_DAY)),
    }
    columns = [made[name] if name in made else rows[name] for name in FILE_SCHEMA.names]
    return pa.Table.from_arrays(columns, schema=FILE_SCHEMA)
