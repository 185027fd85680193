"""Deleting events that are in Iceberg.

Readers may be under way: what is deleted leaves `Partition.first` before it leaves the
disk, and a reader takes its view of the disk before it looks at `first`. Sequences are
never reused: the cleanup watermark is written with the deletion.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from zombi_platform.errors import TerminalError
from zombi_platform.hot import keys
from zombi_platform.hot.buffer import Change, HotBuffer
from zombi_platform.hot.partitions import WATERMARK, Partition
from zombi_platform.hot.scan import blocks_between
from zombi_platform.hot.store import Batch, Store


@dataclass(frozen=True, slots=True)
class Rest:
    """What stays of a partition: first block, bytes ahead of it, its arrival."""

    first: int
    bytes_before: int
    ingest_ms: int | None


async def delete_flushed(
    hot: HotBuffer, change: Change, batch: Batch, table: str, ends: Mapping[int, int]
) -> int:
    """Write the batch and delete the events up to these sequences; returns how many."""
    chosen: list[_Deletion] = []
    for number, end in ends.items():
        member = hot.partitions.find(table, number)
        if member is None or end < member.first:
            continue
        if end > member.flushed:
            raise TerminalError(
                f"events of {table}/{number} past its flush watermark {member.flushed} are "
                f"nowhere else; refusing to delete up to {end}"
            )
        chosen.append(_Deletion(member, end, member.last, member.bytes_end))
    deleted = sum(one.end - one.member.first + 1 for one in chosen)
    for one in chosen:
        one.member.first, one.member.cleaned = one.end + 1, one.end
    rests = await change.run(_delete_blocks, batch, chosen)
    for one, rest in zip(chosen, rests, strict=True):
        _note_rest(one.member, rest)
    hot.recount()
    return deleted


@dataclass(frozen=True, slots=True)
class _Deletion:
    member: Partition
    end: int
    last: int
    bytes_end: int
    """The partition's end when this was decided; more may come meanwhile."""


def _delete_blocks(store: Store, batch: Batch, chosen: list[_Deletion]) -> list[Rest]:
    """Delete whole blocks; one that holds an event past the end stays."""
    rests: list[Rest] = []
    for one in chosen:
        rest, member = _rest(store, one), one.member
        prefix = member.block_prefix
        batch.delete_range(keys.block_key(prefix, 0), keys.block_key(prefix, rest.first))
        suffix = keys.partition_suffix(member.table, member.number)
        batch.put(keys.CLEANUP_WATERMARKS + suffix, WATERMARK.pack(one.end))
        rests.append(rest)
    store.write_surely(batch)
    return rests


def _rest(store: Store, one: _Deletion) -> Rest:
    for block in blocks_between(store, one.member, one.end + 1, one.last):
        return Rest(block.first, block.bytes_before, block.ingest_ms)
    return Rest(one.end + 1, one.bytes_end, None)


def _note_rest(member: Partition, rest: Rest) -> None:
    member.bytes_start, member.oldest_ms = rest.bytes_before, rest.ingest_ms
    if rest.ingest_ms is None and member.last >= member.first:
        member.oldest_ms = time.time_ns() // 1_000_000  # it came during the deletion
    member.small = [block for block in member.small if block.first >= rest.first]
