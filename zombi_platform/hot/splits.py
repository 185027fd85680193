"""Dividing what a cut takes into splits, each about one target file.

A partition with much is divided where its hot blocks end, found by the byte counts that
blocks carry: a few lookups for each split, no scan. Partitions with little share a split,
so that thousands of them are not thousands of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from zombi_platform.cuts import Range, Split
from zombi_platform.errors import CorruptionError
from zombi_platform.hot.blocks import Block
from zombi_platform.hot.partitions import Partition
from zombi_platform.hot.scan import blocks_between
from zombi_platform.hot.store import Store, View

RANGES_MAX: Final = 256
"""Most partitions in one split: each is at least one file of the task."""
SPLITS_MAX: Final = 10_000
"""Most splits in one cut; what is left is for the next one."""
LOOKUPS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class SplitLimits:
    bytes: int
    events: int


@dataclass(frozen=True, slots=True)
class Span:
    """What a partition has for a cut: sequences, and the bytes ahead of and up to its end."""

    partition: Partition
    first: int
    last: int
    start: int
    end: int


def plan_splits(view: View, spans: Iterable[Span], limits: SplitLimits) -> list[Split]:
    """Splits that hold the spans in order, as many as one cut may have."""
    splits: list[Split] = []
    ranges: list[Range] = []
    size = events = 0
    for piece, piece_bytes in _pieces(view, spans, limits):
        full = size + piece_bytes > limits.bytes or events + piece.events > limits.events
        if ranges and (full or len(ranges) == RANGES_MAX):
            splits.append(Split(len(splits), tuple(ranges), size))
            ranges, size, events = [], 0, 0
            if len(splits) == SPLITS_MAX:
                return splits
        if ranges and ranges[-1].partition == piece.partition:
            # Two pieces of one block may fit one split, which has one range of a partition.
            ranges[-1] = replace(ranges[-1], last=piece.last)
        else:
            ranges.append(piece)
        size += piece_bytes
        events += piece.events
    if ranges:
        splits.append(Split(len(splits), tuple(ranges), size))
    return splits


def bytes_up_to(view: View | Store, partition: Partition, sequence: int) -> int:
    """Bytes of the partition's events up to this one, estimated within its block."""
    block = _block_at(view, partition, sequence)
    return block.bytes_before + block.size * (sequence - block.first + 1) // block.count


def _pieces(view: View, spans: Iterable[Span], limits: SplitLimits) -> Iterator[tuple[Range, int]]:
    """The spans in pieces within the limits, each with its bytes."""
    for span in spans:
        first, start = span.first, span.start
        while first <= span.last:
            last, end = _reach(view, span, first, start, limits)
            yield Range(span.partition.number, first, last), max(end - start, 0)
            first, start = last + 1, end


def _reach(view: View, span: Span, first: int, start: int, limits: SplitLimits) -> tuple[int, int]:
    """How far a piece from `first` goes, and the bytes up to there."""
    last, end = span.last, span.end
    if first + limits.events - 1 < last:
        last = first + limits.events - 1
        end = bytes_up_to(view, span.partition, last)
    if end - start <= limits.bytes:
        return last, end
    return _block_end(view, span.partition, (first, start), (last, end), start + limits.bytes)


def _block_end(
    view: View, partition: Partition, low: tuple[int, int], high: tuple[int, int], wanted: int
) -> tuple[int, int]:
    """The last block that ends within the wanted bytes; part of a block if none does.

    `low` and `high` are a sequence and the bytes up to it. The search goes by the average
    size between them, so events of one size are found with two lookups.
    """
    first, most = low[0], high[0]
    for _ in range(LOOKUPS_MAX):
        share = (wanted - low[1]) / max(high[1] - low[1], 1)
        guess = min(max(low[0] + int((high[0] - low[0]) * share), low[0]), high[0])
        block = _block_at(view, partition, guess)
        end = block.bytes_before + block.size
        if end <= wanted and block.last < high[0]:
            low = (block.last + 1, end)
        elif block.bytes_before > wanted and block.first > low[0]:
            high = (block.first - 1, block.bytes_before)
        elif block.first > first:
            return block.first - 1, block.bytes_before
        else:
            share = max(wanted - block.bytes_before, 0) / block.size
            last = min(max(block.first + int(block.count * share) - 1, first), most)
            return last, block.bytes_before + block.size * (last - block.first + 1) // block.count
    return (low[0] - 1, low[1]) if low[0] > first else high


def _block_at(view: View | Store, partition: Partition, sequence: int) -> Block:
    for block in blocks_between(view, partition, sequence, sequence):
        return block
    raise CorruptionError(
        f"sequence {sequence} of partition {partition.number} of table {partition.table!r} "
        "is not in the hot buffer"
    )
