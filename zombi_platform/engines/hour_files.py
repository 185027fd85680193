"""Events of a split as Parquet, one file for each hour and partition. No I/O of its own.

Rows are checked to be exactly the split's before anything is written: every sequence of
every range once and in order. Within a file they are sorted by timestamp_ms, then sequence.
Since they come in the order of their sequences, a stable sort by time alone gives that
order, and rows that came in the order of time are sliced, not moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zombi_platform.cuts import Range, Split
from zombi_platform.errors import CorruptionError
from zombi_platform.events import COLUMNS
from zombi_platform.lake.columns import FILE_SCHEMA, SORT_COLUMNS

HOUR_MS: Final = 3_600_000
HOURS_PER_DAY: Final = 24
ROW_GROUP_EVENTS: Final = 131_072
ROW_GROUP_BYTES: Final = 64 * 2**20
BLOOM_FILTER_FALSE_POSITIVES: Final = 0.01
ZSTD_LEVEL: Final = 1
"""Of JSON payloads the first level makes files as small as the third in 2/3 of the time."""

WRITE_BATCH_EVENTS: Final = 8192
REPEATING: Final = ["topic", "partition", "event_date", "event_hour", "headers.key_value.key"]
"""Columns worth a dictionary. The others are plain: delta encodings would save a
twentieth of the size, but many Iceberg readers refuse them."""

SORTING: Final = pq.SortingColumn.from_ordering(FILE_SCHEMA, list(SORT_COLUMNS))


@dataclass(frozen=True, slots=True)
class HourRows:
    """The events of one hour and partition: what becomes one file."""

    partition: int
    hour: int
    """Hours since 1970-01-01T00:00Z."""
    rows: pa.Table
    """These events, and perhaps others."""
    order: npt.NDArray[np.intp] | slice
    """Which of the rows these are, in the order of the file."""
    events: int

    @property
    def sequences(self) -> tuple[int, int]:
        """The lowest and the highest sequence."""
        chosen = self.rows["sequence"].to_numpy()[self.order]
        return int(chosen.min()), int(chosen.max())

    def take(self, start: int, stop: int) -> pa.Table:
        """A part of these events, in the order of the file."""
        if isinstance(self.order, slice):
            return self.rows.slice(self.order.start + start, min(stop, self.events) - start)
        return self.rows.take(pa.array(self.order[start:stop]))


def arrange(split: Split, batches: Iterable[pa.RecordBatch]) -> list[HourRows]:
    """The files to write for a split, from its events as the gateway sends them."""
    return [
        hour
        for part, rows in zip(split.ranges, _rows_of_ranges(split, batches), strict=True)
        for hour in _hours(part, rows)
    ]


def write_parquet(table: str, hour: HourRows, sink: Any) -> None:
    """The events of one hour as a Parquet file into an open output stream."""
    step = _row_group_events(hour)
    keys = hour.rows["idempotency_key"]
    bloom = {"idempotency_key": {"ndv": step, "fpp": BLOOM_FILTER_FALSE_POSITIVES}}
    with pq.ParquetWriter(
        sink,
        FILE_SCHEMA,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=REPEATING,
        write_batch_size=WRITE_BATCH_EVENTS,
        write_page_index=True,
        # Readers take types from Iceberg's schema; Arrow's own copy would only take room.
        store_schema=False,
        sorting_columns=SORTING,
        bloom_filter_options=bloom if keys.null_count < len(keys) else None,
    ) as writer:
        for start in range(0, hour.events, step):
            rows = _file_columns(table, hour, hour.take(start, start + step))
            writer.write_table(rows, row_group_size=step)


def check_footer(hour: HourRows, footer: pq.FileMetaData) -> None:
    """Raise unless a written file's own footer tells of exactly these events."""
    first, last = hour.sequences
    from_ms, below_ms = hour.hour * HOUR_MS, (hour.hour + 1) * HOUR_MS
    sequences = _bounds(footer, "sequence")
    stamps = _bounds(footer, "timestamp_ms")
    if (
        footer.num_rows != hour.events
        or sequences != (first, last)
        or not from_ms <= stamps[0] <= stamps[1] < below_ms
    ):
        raise CorruptionError(
            f"a file of partition {hour.partition}, hour {hour.hour} holds {footer.num_rows} "
            f"events, sequences {sequences}, times {stamps}; {hour.events} events of sequences "
            f"{(first, last)} were written"
        )


def _rows_of_ranges(split: Split, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of each range in turn; raises unless they are all there and no others."""
    source = iter(batches)
    rest: pa.RecordBatch | None = None
    for part in split.ranges:
        taken: list[pa.RecordBatch] = []
        missing = part.events
        while missing:
            batch = rest if rest is not None else next(source, None)
            if batch is None:
                raise _wrong(split, f"ends {missing} events before the end of {part}")
            taken.append(batch.slice(0, missing))
            rest = batch.slice(missing) if batch.num_rows > missing else None
            missing -= taken[-1].num_rows
        rows = pa.Table.from_batches(taken, COLUMNS)
        _check_range(split, part, rows)
        yield rows
    if rest is not None or any(batch.num_rows for batch in source):
        raise _wrong(split, "goes on after its last event")


def _check_range(split: Split, part: Range, rows: pa.Table) -> None:
    sequences = rows["sequence"].to_numpy()
    if not np.array_equal(sequences, np.arange(part.first, part.last + 1)):
        raise _wrong(split, f"does not have the sequences of {part} one by one")
    if not (rows["partition"].to_numpy() == part.partition).all():
        raise _wrong(split, f"has rows of other partitions in {part}")


def _wrong(split: Split, what: str) -> CorruptionError:
    return CorruptionError(
        f"split {split.number} of {split.events} events, as the gateway sent it, {what}; "
        "nothing was written"
    )


def _hours(part: Range, rows: pa.Table) -> Iterator[HourRows]:
    stamps = rows["timestamp_ms"].to_numpy()
    in_order = bool((stamps[1:] >= stamps[:-1]).all())
    if not in_order:
        order = np.argsort(stamps, kind="stable")
        stamps = stamps[order]
        # Taking from many chunks would join them again for every row group.
        rows = rows.combine_chunks()
    hours = stamps // HOUR_MS
    starts = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
    for start, stop in pairwise(starts):
        chosen = slice(start, stop) if in_order else order[start:stop]
        yield HourRows(part.partition, int(hours[start]), rows, chosen, stop - start)


def _row_group_events(hour: HourRows) -> int:
    event_bytes = max(1, int(hour.rows.nbytes) // int(hour.rows.num_rows))
    return max(1, min(ROW_GROUP_EVENTS, ROW_GROUP_BYTES // event_bytes, hour.events))


def _file_columns(table: str, hour: HourRows, rows: pa.Table) -> pa.Table:
    day, hour_of_day = divmod(hour.hour, HOURS_PER_DAY)
    constants = {
        "topic": pa.scalar(table, pa.string()),
        "event_date": pa.scalar(day, pa.int32()).cast(pa.date32()),
        "event_hour": pa.scalar(hour_of_day, pa.int32()),
    }
    columns = [
        pa.repeat(constants[name], rows.num_rows) if name in constants else rows[name]
        for name in FILE_SCHEMA.names
    ]
    return pa.Table.from_arrays(columns, schema=FILE_SCHEMA)


def _bounds(footer: pq.FileMetaData, column: str) -> tuple[int, int]:
    """The lowest and highest value of a column, over all row groups."""
    place = FILE_SCHEMA.get_field_index(column)
    found = [
        footer.row_group(group).column(place).statistics for group in range(footer.num_row_groups)
    ]
    return min(one.min for one in found), max(one.max for one in found)
