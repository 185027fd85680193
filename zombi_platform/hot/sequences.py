"""Where sequences go on: never at one that the lake has already.

A data directory that is new, or older than the lake, learns from the lake how far each
partition has come before it gives out a sequence. That it has learnt so is marked durably,
together with what it learnt. Nothing that is in the hot buffer alone is ever deleted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zombi_platform.hot import keys
from zombi_platform.hot.buffer import HotBuffer
from zombi_platform.hot.partitions import WATERMARK, Partition, Partitions
from zombi_platform.hot.store import Batch, Store


@dataclass(frozen=True, slots=True)
class Ahead:
    """A partition of which the lake holds sequences that other events have here."""

    partition: int
    watermark: int
    flushed: int
    last: int


class Sequences:
    def __init__(self, hot: HotBuffer) -> None:
        self._hot = hot
        self.marked = False
        """Whether this data directory has ever been confirmed against the lake."""
        hot.follow(self._load)

    def _load(self, store: Store, _: Partitions) -> None:
        self.marked = store.get(keys.CONFIRMED) is not None

    async def mark(self) -> None:
        async with self._hot.changing() as change:
            batch = change.store.batch()
            batch.put(keys.CONFIRMED, b"1")
            await change.run(Store.write_surely, batch)
            self.marked = True

    async def continue_above(self, table: str, watermarks: Mapping[int, int]) -> list[Ahead]:
        """Go on above the lake's watermarks; returns the partitions where that cannot be.

        Only for a table that takes no write meanwhile.
        """
        async with self._hot.changing() as change:
            batch = change.store.batch()
            ahead: list[Ahead] = []
            moved: list[tuple[Partition, int]] = []
            for number, watermark in watermarks.items():
                member = self._hot.partitions.ensure(table, number)
                if watermark <= member.flushed:
                    continue
                if member.last > member.flushed:
                    ahead.append(Ahead(number, watermark, member.flushed, member.last))
                    continue
                _put(batch, member, watermark)
                moved.append((member, watermark))
            if moved:
                for member, watermark in moved:
                    member.first = watermark + 1
                await change.run(Store.write_surely, batch)
                for member, watermark in moved:
                    _move(member, watermark)
                self._hot.recount()
            return ahead


def _put(batch: Batch, member: Partition, watermark: int) -> None:
    suffix = keys.partition_suffix(member.table, member.number)
    for name in (keys.FLUSH_WATERMARKS, keys.CLEANUP_WATERMARKS):
        batch.put(name + suffix, WATERMARK.pack(watermark))
    # All of it is in the lake by the flush watermark here as well; left in place it would
    # be followed by a gap.
    prefix = member.block_prefix
    batch.delete_range(keys.block_key(prefix, 0), prefix + keys.AFTER)


def _move(member: Partition, watermark: int) -> None:
    member.last = member.flushed = member.cleaned = member.cut = watermark
    member.bytes_start = member.cut_bytes = member.bytes_end
    member.oldest_ms, member.small = None, []
