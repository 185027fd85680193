"""Reading events back as Arrow, in bounded memory.

`scan` streams one partition in sequence order, the way the pipeline reads. `select` finds
what a reader asked for by time or over all partitions: a first pass keeps only timestamps,
sizes and positions of the wanted events, a second one streams them in order. Readers see
no event past the high watermark they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from zombi_platform.errors import CorruptionError
from zombi_platform.events import COLUMNS
from zombi_platform.hot import keys
from zombi_platform.hot.blocks import Block, decode_block, to_arrow
from zombi_platform.hot.partitions import Partition
from zombi_platform.hot.store import Cursor, Store, View

BATCH_BYTES: Final = 2**20
BATCH_EVENTS: Final = 65_536
CANDIDATES_SLACK: Final = 262_144
"""Candidates kept past twice the limit before the first pass sorts and drops the surplus."""

Candidates = npt.NDArray[np.void]
CANDIDATE: Final = np.dtype([("ts", "<i8"), ("partition", "<i8"), ("seq", "<i8"), ("size", "<i8")])


def blocks_between(
    view: View | Store, partition: Partition, first: int, last: int
) -> Iterator[Block]:
    """The blocks that hold the sequences `first` to `last`, in order."""
    if first > last:
        return
    prefix = partition.block_prefix
    cursor = view.iterator()
    _seek_block(cursor, prefix, first)
    while cursor.valid() and cursor.key().startswith(prefix):
        start = keys.block_first(cursor.key())
        if start > last:
            break
        block = decode_block(cursor.value(), start)
        if block.last >= first:
            yield block
        cursor.next()
    cursor.status()


def _seek_block(cursor: Cursor, prefix: bytes, sequence: int) -> None:
    """Move to the block that holds the sequence, or to the first one after it."""
    cursor.seek_for_prev(keys.block_key(prefix, sequence))
    if not cursor.valid() or not cursor.key().startswith(prefix):
        cursor.seek(keys.block_key(prefix, sequence))


def scan(view: View, partition: Partition, first: int, last: int) -> Iterator[pa.RecordBatch]:
    """The sequences `first` to `last` of a partition, whole: a missing one raises."""
    expected = first
    for run in _runs(blocks_between(view, partition, first, last)):
        batch = to_arrow(partition.number, run)
        skip = max(first - run[0].first, 0)
        batch = batch.slice(skip, min(last, run[-1].last) - run[0].first - skip + 1)
        if run[0].first + skip != expected:
            break
        expected += batch.num_rows
        yield batch
    if expected <= last:
        raise CorruptionError(
            f"sequence {expected} of partition {partition.number} of table "
            f"{partition.table!r} is not in the hot buffer"
        )


def _runs(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    run: list[Block] = []
    events = size = 0
    for block in blocks:
        if run and (size + block.size > BATCH_BYTES or events + block.count > BATCH_EVENTS):
            yield run
            run, events, size = [], 0, 0
        run.append(block)
        events += block.count
        size += block.size
    if run:
        yield run


def select(
    view: View,
    ranges: Sequence[tuple[Partition, int, int]],
    since: int | None,
    limit: int,
    *,
    by_time: bool,
) -> tuple[Candidates, bool]:
    """The first `limit` events and whether there are more.

    Ordered by timestamp, partition, sequence, or by sequence alone for one partition.

    A range is a partition with the first and last sequence to look at.
    """
    kept: list[Candidates] = []
    count, bar = 0, np.iinfo(np.int64).max
    for partition, first, last in ranges:
        for block in blocks_between(view, partition, first, last):
            if (since is not None and block.ts_max < since) or block.ts_min > bar:
                continue
            found = _candidates(partition.number, block, first, last, since)
            kept.append(found)
            count += len(found)
            if count > 2 * limit + CANDIDATES_SLACK:
                kept = [_in_order(kept, by_time)[: limit + 1]]
                count = len(kept[0])
                if not by_time and count > limit:
                    break
                bar = int(kept[0]["ts"][-1]) if by_time else bar
    ordered = _in_order(kept, by_time)
    return ordered[:limit], len(ordered) > limit


def fetch(
    view: View, partitions: dict[int, Partition], chosen: Candidates
) -> Iterator[pa.RecordBatch]:
    """The selected events in their order, a bounded number of bytes at a time."""
    sizes = chosen["size"].cumsum()
    start = 0
    while start < len(chosen):
        base = int(sizes[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(sizes, base + BATCH_BYTES, side="right")))
        yield _fetch_chunk(view, partitions, chosen[start : min(end, start + BATCH_EVENTS)])
        start = min(end, start + BATCH_EVENTS)


def _candidates(number: int, block: Block, first: int, last: int, since: int | None) -> Candidates:
    found = np.empty(block.count, dtype=CANDIDATE)
    found["ts"] = np.frombuffer(block.timestamps, "<i8")
    found["partition"] = number
    found["seq"] = np.arange(block.first, block.first + block.count)
    found["size"] = np.frombuffer(block.payload_lengths, "<u4")
    found["size"] += 64  # what an event costs besides its payload
    found = found[max(first - block.first, 0) : last - block.first + 1]
    return found if since is None else found[found["ts"] >= since]


def _in_order(parts: Sequence[Candidates], by_time: bool) -> Candidates:
    if not parts:
        return np.empty(0, dtype=CANDIDATE)
    joined = np.concatenate(parts)
    if not by_time:
        return joined  # one partition is read in the order of its sequences
    return joined[np.lexsort((joined["seq"], joined["partition"], joined["ts"]))]


def _fetch_chunk(view: View, partitions: dict[int, Partition], chunk: Candidates) -> pa.RecordBatch:
    """Read the chunk's events partition by partition, then put them in the chunk's order."""
    by_place = np.lexsort((chunk["seq"], chunk["partition"]))
    batches: list[pa.RecordBatch] = []
    for number in np.unique(chunk["partition"]):
        wanted = np.sort(chunk["seq"][chunk["partition"] == number])
        batches += _rows(view, partitions[int(number)], wanted)
    rows = pa.Table.from_batches(batches, COLUMNS).combine_chunks()
    if rows.num_rows != len(chunk):
        raise CorruptionError(f"{len(chunk) - rows.num_rows} selected events are gone")
    order = np.empty(len(chunk), dtype=np.int64)
    order[by_place] = np.arange(len(chunk))
    return rows.take(pa.array(order)).combine_chunks().to_batches()[0]


def _rows(
    view: View, partition: Partition, wanted: npt.NDArray[np.int64]
) -> Iterator[pa.RecordBatch]:
    """These sequences of a partition, jumping over the blocks between them."""
    cursor = view.iterator()
    position = 0
    while position < len(wanted):
        _seek_block(cursor, partition.block_prefix, int(wanted[position]))
        cursor.status()
        if not cursor.valid():
            return
        block = decode_block(cursor.value(), keys.block_first(cursor.key()))
        end = int(np.searchsorted(wanted, block.last, side="right"))
        rows = pa.array(wanted[position:end] - block.first)
        yield to_arrow(partition.number, [block]).take(rows)
        position = end
