"""Merging small blocks, so that slow producers do not leave one block for each event.

Blocks at the end of a partition are grouped in tiers by size. When enough neighbours of a
tier have gathered they are replaced by one block, in one batch: the merged block takes the
place of the first, the others are deleted. An event is rewritten at most once per tier.
Readers hold iterators, which see either the small blocks or the merged one, never both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zombi_platform.hot import keys
from zombi_platform.hot.blocks import Block, merge_blocks
from zombi_platform.hot.partitions import (
    SETTLED_BYTES,
    SETTLED_EVENTS,
    Partition,
    SmallBlock,
)
from zombi_platform.hot.scan import blocks_between
from zombi_platform.hot.store import Store

FAN_IN: Final = 16
TIERS: Final = (32, SETTLED_EVENTS)
"""A block with fewer events than a number here belongs to that tier or a lower one."""


def plan(partition: Partition) -> tuple[int, int] | None:
    """The (first, last) sequences of a run worth merging; drops blocks that are settled."""
    small = partition.small
    settled = max((i for i, block in enumerate(small) if block.settled), default=-1)
    del small[: settled + 1]
    for limit in TIERS:
        run = len(small)
        while run and small[run - 1].count < limit:
            run -= 1
        if len(small) - run >= FAN_IN:
            return small[run].first, small[-1].last
    return None


def merge(store: Store, partition: Partition, first: int, last: int) -> list[SmallBlock]:
    """Rewrite the blocks of these sequences as few larger ones, which are returned."""
    batch = store.batch()
    merged: list[SmallBlock] = []
    for run in _runs(store, partition, first, last):
        head, tail = run[0], run[-1]
        if len(run) > 1:
            batch.put(keys.block_key(partition.block_prefix, head.first), merge_blocks(run))
            for block in run[1:]:
                batch.delete(keys.block_key(partition.block_prefix, block.first))
        size = sum(block.size for block in run)
        merged.append(SmallBlock(head.first, tail.last - head.first + 1, size))
    store.write_lazily(batch)
    return merged


def note_merged(partition: Partition, merged: list[SmallBlock]) -> None:
    """Put merged blocks in place of the small ones they stand for."""
    first, last = merged[0].first, merged[-1].last
    before = [block for block in partition.small if block.last < first]
    after = [block for block in partition.small if block.first > last]
    partition.small = [*before, *merged, *after]


def _runs(store: Store, partition: Partition, first: int, last: int) -> Iterator[list[Block]]:
    """The stored blocks of these sequences, grouped so that each group but the last settles."""
    run: list[Block] = []
    count = size = 0
    for block in blocks_between(store, partition, first, last):
        run.append(block)
        count += block.count
        size += block.size
        if count >= SETTLED_EVENTS or size >= SETTLED_BYTES:
            yield run
            run, count, size = [], 0, 0
    if run:
        yield run
