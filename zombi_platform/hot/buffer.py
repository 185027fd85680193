"""The hot buffer as the gateway sees it: append, read, watermarks, upkeep.

Writes go through the group commit; reads run in a bounded pool of threads and never see
past the high watermark. Upkeep merges small blocks and forgets old keys, one step at a
time. When RocksDB refuses a write the buffer stops taking more, reopens the database and
rebuilds its state from disk: the outcome of that write is looked up, not guessed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from zombi_platform.errors import (
    BufferFullError,
    CorruptionError,
    HotStorageError,
    NotFoundError,
    ZombiError,
)
from zombi_platform.hot import keys
from zombi_platform.hot.expiry import forget_keys
from zombi_platform.hot.group_commit import Append, Committed, GroupCommit
from zombi_platform.hot.merging import merge, note_merged, plan
from zombi_platform.hot.partitions import WATERMARK, Partition, Partitions
from zombi_platform.hot.scan import fetch, scan, select
from zombi_platform.hot.store import Batch, Store, View
from zombi_platform.settings import Settings

UPKEEP_SECS: Final = 0.25
REOPEN_SECS: Final = 1.0

T = TypeVar("T")

log = logging.getLogger("zombi.hot")


@dataclass(frozen=True, slots=True)
class Change:
    """The right to change what is stored, for as long as `HotBuffer.changing` gives it."""

    store: Store
    _in_thread: Callable[..., Awaitable[Any]]

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call work with the database and the arguments, in a thread."""
        done: T = await self._in_thread(work, self.store, *args)
        return done


@dataclass(frozen=True, slots=True)
class TableSummary:
    table: str
    partitions: int
    events: int
    bytes: int
    oldest_unflushed_secs: float | None


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Of one partition: last sequence given out, last one in Iceberg, last one deleted here."""

    high_watermark: int
    flush_watermark: int
    cleanup_watermark: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read found: batches in order, to be drawn in a reader thread."""

    batches: Iterator[pa.RecordBatch]
    has_more: bool


class HotBuffer:
    """Owns the database. Made and used in one event loop; `reading` and `scan` in threads."""

    def __init__(
        self, settings: Settings, on_commit: Callable[[Committed], None] | None = None
    ) -> None:
        self._settings = settings
        self._watcher = on_commit
        self._max_bytes = settings.max_hot_bytes_mb * 2**20
        self._loads: list[Callable[[Store, Partitions], None]] = []
        self._arrivals: list[Callable[[Set[Partition]], None]] = []
        self._store = Store(settings)
        self.partitions = self._load(self._store)
        self._bytes = self._count_bytes()
        self._failure: HotStorageError | None = None
        self._dirty: set[Partition] = set()
        self._commits = GroupCommit(
            self._store,
            self.partitions,
            in_thread=settings.durability == "fsync",
            on_commit=self._committed,
            on_failure=self._failed,
        )
        self._loop = asyncio.get_running_loop()
        self._rewriting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="hot-upkeep")
        self._upkeep = asyncio.create_task(self._keep_up())

    # Writing

    def check_room(self) -> None:
        """Raise unless a write may be submitted now."""
        if self._failure is not None:
            raise HotStorageError(str(self._failure), retry_after_secs=2)
        if self._bytes >= self._max_bytes:
            raise BufferFullError(
                f"the hot buffer holds {self._bytes >> 20} MB of at most "
                f"{self._settings.max_hot_bytes_mb} MB (ZOMBI_MAX_HOT_BYTES_MB); "
                "retry when the pipeline has flushed",
                retry_after_secs=5,
            )

    def submit(self, append: Append) -> None:
        """Queue a write; its `done` is called when it is durable or has failed."""
        self._commits.submit(append)

    @property
    def bytes(self) -> int:
        """Bytes of events and keys held, against the limit."""
        return self._bytes

    @property
    def failure(self) -> ZombiError | None:
        return self._failure

    # Reading

    def tables(self) -> list[TableSummary]:
        names = sorted(self.partitions.tables)
        return [self._summary(name, found) for name in names if (found := self._known(name))]

    def watermarks(self, table: str) -> dict[int, Watermarks]:
        return {
            partition.number: Watermarks(partition.last, partition.flushed, partition.cleaned)
            for partition in self._need_table(table)
        }

    def reading(
        self, table: str, partition: int | None, offset: int, limit: int, since: int | None
    ) -> Reading:
        """Find what a reader asked for; blocks on disk, so it runs in a thread."""
        members = self._need_table(table)
        if partition is not None:
            members = [member for member in members if member.number == partition]
        with _reads():
            # What is deleted is out of `first` before, what is new is in `last` after it is
            # stored: looked at in this order, the view holds all that lies between them.
            ends = [(member, member.last) for member in members]
            view = self._store.view()
            ranges = [(member, max(offset, member.first), last) for member, last in ends]
            ranges = [(member, first, last) for member, first, last in ranges if first <= last]
            if partition is not None and since is None:
                if not ranges:
                    return Reading(iter(()), has_more=False)
                member, first, last = ranges[0]
                end = min(last, first + limit - 1)
                return Reading(_guarded(scan(view, member, first, end)), has_more=end < last)
            chosen, has_more = select(view, ranges, since, limit, by_time=partition is None)
        found = {member.number: member for member in members}
        return Reading(_guarded(fetch(view, found, chosen)), has_more)

    def scan(self, table: str, partition: int, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """The sequences `first` to `last`, all of them or an error; runs in a thread."""
        member = self.partitions.find(table, partition)
        inside = member is not None and last <= member.last
        view = self.view()
        if member is None or not inside or first < member.first:
            raise NotFoundError(
                f"sequences {first} to {last} of partition {partition} of table {table!r} "
                "are not in the hot buffer"
            )
        return _guarded(scan(view, member, first, last))

    def view(self) -> View:
        """What is stored at this moment; for threads that read."""
        with _reads():
            return self._store.view()

    # Changes besides writes

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Change]:
        """Alone among all who change what is stored: merging, cuts, deletion, reopening.

        A change that did not end as it should may or may not be stored: then the database
        is opened again and everything known of it rebuilt.
        """
        async with self._rewriting:
            if self._failure is not None:
                raise HotStorageError(str(self._failure), retry_after_secs=2)
            try:
                yield Change(self._store, self._in_thread)
            except HotStorageError as error:
                self._failed(error)
                raise
            except ZombiError:
                raise  # refused before anything was written, or after all of it was
            except BaseException as error:
                # By no name: a frame and the error raised in it would keep each other, and with
                # them a batch, until the collector comes by.
                self._failed(HotStorageError(f"a change was interrupted: {error!r}"))
                raise HotStorageError(f"a change was interrupted: {error!r}") from error

    def follow(
        self,
        load: Callable[[Store, Partitions], None],
        arrived: Callable[[Set[Partition]], None] | None = None,
    ) -> None:
        """Keep memory of stored things true.

        `load` reads them anew, now and, in a thread, whenever the database was reopened;
        `arrived` is told a few times a second which partitions have new events.
        """
        load(self._store, self.partitions)
        self._loads.append(load)
        if arrived is not None:
            self._arrivals.append(arrived)

    def recount(self) -> None:
        """Count what is held anew, after a deletion."""
        self._bytes = self._count_bytes()

    # Consumer offsets

    async def commit_offset(self, group: str, table: str, partition: int, offset: int) -> None:
        batch = self._store.batch()
        batch.put(keys.consumer_key(group, table, partition), WATERMARK.pack(offset))
        await self._in_thread(self._write, batch)

    async def committed_offset(self, group: str, table: str, partition: int) -> int | None:
        with _reads():
            key = keys.consumer_key(group, table, partition)
            value = await self._in_thread(self._store.get, key)
        return None if value is None else int(WATERMARK.unpack(value)[0])

    def _write(self, batch: Batch) -> None:
        """Write what is no event; runs in the upkeep thread."""
        try:
            self._store.write(batch)
        except HotStorageError as error:
            self._loop.call_soon_threadsafe(self._failed, error)
            raise

    # Life

    def disk_bytes(self) -> int:
        return self._store.disk_bytes()

    async def close(self) -> None:
        """Finish what was submitted, then close the database."""
        while not self._commits.idle():
            await asyncio.sleep(0.001)
        self._commits.close()
        self._upkeep.cancel()
        await asyncio.gather(self._upkeep, return_exceptions=True)
        await self._in_thread(self._store.close)
        self._threads.shutdown()

    def _committed(self, committed: Committed) -> None:
        self._bytes += committed.bytes
        self._dirty.update(committed.partitions)
        if self._watcher is not None:
            self._watcher(committed)

    def _failed(self, failure: HotStorageError) -> None:
        if self._failure is None:
            log.error("%s; no write is taken until the database is reopened", failure)
        # A new one: the traceback of the old one holds a batch, which keeps the database open.
        self._failure = HotStorageError(str(failure))
        self._commits.refuse(self._failure)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_SECS)
            try:
                if self._failure is not None:
                    await self._reopen()
                    continue
                await self._merge_small_blocks()
                await self._forget_keys()
            except CorruptionError as error:
                # Reopening would read the same bytes; the events around them stay usable.
                log.error("upkeep found what it cannot mend: %s", error)
            except HotStorageError as error:
                self._failed(error)
            except Exception as error:
                self._failed(HotStorageError(f"RocksDB cannot be read: {error}"))

    async def _merge_small_blocks(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for arrived in self._arrivals:
            arrived(dirty)
        for partition in dirty:
            while (run := plan(partition)) is not None:
                async with self._rewriting:
                    if run[0] < partition.first:
                        break  # deleted meanwhile
                    merged = await self._in_thread(merge, self._store, partition, *run)
                    note_merged(partition, merged)

    async def _forget_keys(self) -> None:
        before_ms = time.time_ns() // 1_000_000 - self._settings.idempotency_window_secs * 1000
        while True:
            count, size = await self._in_thread(forget_keys, self._store, before_ms)
            self._bytes -= size
            if not count:
                return

    async def _reopen(self) -> None:
        """Close and open the database; the state comes from what is really there.

        A reader that still draws from the old one keeps it open, and opening fails until
        that reader is done; so does a disk that is still full.
        """
        if not self._commits.idle():
            return
        async with self._rewriting:
            try:
                await self._in_thread(self._store.close)
                store = await self._in_thread(Store, self._settings)
                partitions = await self._in_thread(self._load_or_close, store)
            except Exception as error:
                log.error("cannot reopen the hot buffer: %s", error)
                await asyncio.sleep(REOPEN_SECS)
                return
            self._store, self.partitions = store, partitions
            self._commits.resume(store, partitions)
            self._dirty = set(partitions)
            self._bytes = self._count_bytes()
            self._failure = None
            log.warning("the hot buffer was reopened and takes writes again")

    def _load(self, store: Store) -> Partitions:
        partitions = Partitions(self._settings.max_tables, self._settings.max_partitions)
        partitions.load(store)
        for load in self._loads:
            load(store, partitions)
        return partitions

    def _load_or_close(self, store: Store) -> Partitions:
        try:
            return self._load(store)
        except Exception:
            store.close()
            raise

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _count_bytes(self) -> int:
        return sum(member.bytes for member in self.partitions) + self._store.keys_bytes()

    def _known(self, table: str) -> list[Partition]:
        return self.partitions.known(table)

    def _need_table(self, table: str) -> list[Partition]:
        members = self._known(table)
        if not members:
            raise NotFoundError(
                f"table {table!r} has no events; a table begins with its first write",
                code="TABLE_NOT_FOUND",
            )
        return members

    def _summary(self, table: str, members: list[Partition]) -> TableSummary:
        arrivals = [
            member.oldest_ms
            for member in members
            if member.oldest_ms is not None and member.last > member.flushed
        ]
        oldest = (time.time() - min(arrivals) / 1000) if arrivals else None
        return TableSummary(
            table=table,
            partitions=len(members),
            events=sum(member.events for member in members),
            bytes=sum(member.bytes for member in members),
            oldest_unflushed_secs=None if oldest is None else max(oldest, 0.0),
        )


@contextmanager
def _reads() -> Iterator[None]:
    """RocksDB's own errors, which have no class, as ours: a retry after a reopen may help."""
    try:
        yield
    except ZombiError:
        raise
    except Exception as error:
        raise HotStorageError(f"RocksDB cannot be read: {error}") from error


def _guarded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with _reads():
        yield from batches
