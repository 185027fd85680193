"""What the hot buffer holds of each table and partition, in memory.

`last` is the high watermark: it moves only after the events up to it are durable, so
whoever reads up to `last` reads nothing that could still be lost. The state is rebuilt from
the blocks and watermarks on disk; nothing here is written by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from zombi_platform.errors import CorruptionError, RejectedError
from zombi_platform.hot import keys
from zombi_platform.hot.blocks import Block, decode_block
from zombi_platform.hot.store import Store

WATERMARK: Final = struct.Struct(">Q")
SETTLED_EVENTS: Final = 512
SETTLED_BYTES: Final = 64 * 2**10
"""A block with this much is large enough and never merged again."""
TAIL_BLOCKS_MAX: Final = 1024
"""How many blocks from the end are looked at on start-up to find small ones to merge."""


class SmallBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that merging may still make larger."""

    first: int
    count: int
    size: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def settled(self) -> bool:
        return self.count >= SETTLED_EVENTS or self.size >= SETTLED_BYTES


class Partition:
    """One partition of one table."""

    __slots__ = (
        "block_prefix",
        "bytes_end",
        "bytes_start",
        "cleaned",
        "cut",
        "cut_bytes",
        "first",
        "flushed",
        "idempotency_prefix",
        "last",
        "number",
        "oldest_ms",
        "small",
        "table",
    )

    def __init__(self, table: str, number: int) -> None:
        self.table = table
        self.number = number
        self.block_prefix = keys.block_prefix(table, number)
        self.idempotency_prefix = keys.idempotency_prefix(table, number)
        self.first = 1
        self.last = 0
        self.flushed = 0
        self.cleaned = 0
        self.cut = 0
        """The last sequence that a cut has taken."""
        self.cut_bytes = 0
        """Where it lies, counted like `bytes_end`."""
        self.bytes_start = 0
        self.bytes_end = 0
        self.oldest_ms: int | None = None
        """When the oldest hot event arrived."""
        self.small: list[SmallBlock] = []
        """The blocks at the end that may still be merged."""

    @property
    def events(self) -> int:
        return self.last - self.first + 1

    @property
    def bytes(self) -> int:
        return self.bytes_end - self.bytes_start


class Partitions:
    """All partitions, with the limits on how many tables and partitions there may be."""

    def __init__(self, max_tables: int, max_partitions: int) -> None:
        self._max_tables = max_tables
        self._max_partitions = max_partitions
        self._count = 0
        self.tables: dict[str, dict[int, Partition]] = {}

    def __iter__(self) -> Iterator[Partition]:
        for table in list(self.tables.values()):
            yield from list(table.values())

    def find(self, table: str, number: int) -> Partition | None:
        members = self.tables.get(table)
        return None if members is None else members.get(number)

    def known(self, table: str) -> list[Partition]:
        """The table's partitions that ever held an event, by number."""
        members = self.tables.get(table, {})
        return sorted((p for p in list(members.values()) if p.last), key=lambda p: p.number)

    def need(self, table: str, numbers: list[int]) -> list[Partition]:
        """These partitions, made where they are new; raises before it makes any past a limit."""
        members = self.tables.get(table)
        if members is not None:
            try:
                return [members[number] for number in numbers]
            except KeyError:
                pass
        elif len(self.tables) >= self._max_tables:
            raise TooManyError(
                f"table {table!r} would be one more than {self._max_tables}; raise "
                "ZOMBI_MAX_TABLES if that is meant",
                code="TOO_MANY_TABLES",
            )
        new = set(numbers).difference(members or ())
        if self._count + len(new) > self._max_partitions:
            raise TooManyError(
                f"{len(new)} new partitions of table {table!r} would make more than "
                f"{self._max_partitions}; raise ZOMBI_MAX_PARTITIONS if that is meant",
                code="TOO_MANY_PARTITIONS",
            )
        for number in new:
            self._add(table, number)
        members = self.tables[table]
        return [members[number] for number in numbers]

    def ensure(self, table: str, number: int) -> Partition:
        """This partition, made if it is new, even past the limits: it exists elsewhere."""
        return self.find(table, number) or self._add(table, number)

    def _add(self, table: str, number: int) -> Partition:
        partition = Partition(table, number)
        self.tables.setdefault(table, {})[number] = partition
        self._count += 1
        return partition

    def load(self, store: Store) -> None:
        """Rebuild everything from disk; what is stored is kept even past the limits."""
        self.tables.clear()
        self._count = 0
        for name, attribute in (
            (keys.FLUSH_WATERMARKS, "flushed"),
            (keys.CLEANUP_WATERMARKS, "cleaned"),
        ):
            for key, value in store.items(name):
                table, number = keys.parse_partition(key, name)
                partition = self.ensure(table, number)
                setattr(partition, attribute, WATERMARK.unpack(value)[0])
        for partition in self:
            partition.last = max(partition.flushed, partition.cleaned)
            partition.first = partition.last + 1
        for table, number in _stored_partitions(store):
            _load_partition(store, self.ensure(table, number))


class TooManyError(RejectedError):
    """A table or partition past the configured number."""

    status = 413


def _stored_partitions(store: Store) -> Iterator[keys.PartitionId]:
    cursor = store.iterator()
    cursor.seek(keys.BLOCKS)
    while cursor.valid() and cursor.key().startswith(keys.BLOCKS):
        found = keys.parse_partition(cursor.key(), keys.BLOCKS)
        yield found
        cursor.seek(keys.block_prefix(*found) + keys.AFTER)
    cursor.status()


def _load_partition(store: Store, partition: Partition) -> None:
    head = _block_at(store, partition)
    tail = store.last_under(partition.block_prefix)
    if head is None or tail is None:
        raise CorruptionError(f"partition {partition.number} of {partition.table!r} has no block")
    end = decode_block(tail[1], keys.block_first(tail[0]))
    partition.first = max(head.first, partition.cleaned + 1)
    partition.last = max(end.last, partition.last)
    partition.bytes_start = head.bytes_before
    partition.bytes_end = end.bytes_before + end.size
    partition.oldest_ms = head.ingest_ms
    partition.small = _small_blocks(store, partition)


def _block_at(store: Store, partition: Partition) -> Block | None:
    for key, value in store.items(partition.block_prefix):
        return decode_block(value, keys.block_first(key))
    return None


def _small_blocks(store: Store, partition: Partition) -> list[SmallBlock]:
    """The blocks at the end that are not settled yet, oldest first."""
    found: list[SmallBlock] = []
    cursor = store.iterator()
    cursor.seek_for_prev(partition.block_prefix + keys.AFTER)
    while len(found) < TAIL_BLOCKS_MAX and cursor.valid():
        if not cursor.key().startswith(partition.block_prefix):
            break
        block = decode_block(cursor.value(), keys.block_first(cursor.key()))
        small = SmallBlock(block.first, block.count, block.size)
        if small.settled:
            break
        found.append(small)
        cursor.prev()
    cursor.status()
    return found[::-1]
