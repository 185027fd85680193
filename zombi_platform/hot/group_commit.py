"""Group commit: all writes that arrive in one turn of the event loop become one batch.

A group is formed only when the group before it has ended. So a lookup of idempotency keys
sees every earlier event, sequences are given out only to what is written next (INV-1, and
no gap after a failed write), and an ack leaves only after its group is durable (INV-2).
With fsync the write runs in a thread while the next group gathers; without, it runs in
place, and moves to the thread only when RocksDB would stall.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from zombi_platform.errors import HotStorageError, ZombiError
from zombi_platform.hot import keys
from zombi_platform.hot.blocks import (
    BLOCK_BYTES_MAX,
    BLOCK_EVENTS_MAX,
    HEADER,
    Segment,
    encode_block,
)
from zombi_platform.hot.partitions import Partition, Partitions, SmallBlock
from zombi_platform.hot.store import Batch, Store

PREFIXES_MAX: Final = 1024
"""Prefixes of idempotency keys that are remembered instead of made again for each key."""

_idempotency_prefix: Final = lru_cache(PREFIXES_MAX)(keys.idempotency_prefix)


class Append(msgspec.Struct, gc=False, eq=False):
    """One write request. `done` is called once, in the loop, with this and the error or None."""

    table: str
    segments: list[Segment]
    done: Callable[[Any, ZombiError | None], None]


class Tail(msgspec.Struct, gc=False):
    """What a group adds to one partition."""

    partition: Partition
    next: int
    segments: list[Segment]
    blocks: list[SmallBlock]
    bytes_end: int


class Group(msgspec.Struct, gc=False):
    batch: Batch
    appends: list[Append]
    refused: list[tuple[Append, ZombiError]]
    tails: list[Tail]
    key_bytes: int
    ingest_ms: int
    started: float


class Committed(msgspec.Struct, gc=False, frozen=True):
    """What one group wrote, for whoever watches."""

    events: int
    requests: int
    write_secs: float
    bytes: int
    """Of events and idempotency keys."""
    partitions: list[Partition]


class GroupCommit:
    """The only writer of events. Its methods run in the event loop's thread."""

    def __init__(
        self,
        store: Store,
        partitions: Partitions,
        *,
        in_thread: bool,
        on_commit: Callable[[Committed], None],
        on_failure: Callable[[HotStorageError], None],
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._in_thread = in_thread
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._pending: list[Append] = []
        self._scheduled = False
        self._writing = False
        self._failure: HotStorageError | None = None
        self._expiries = 0
        self._groups: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_groups, name="group-commit")
        self._thread.start()

    def submit(self, append: Append) -> None:
        """Queue a request; the caller has checked that there is room for it."""
        self._pending.append(append)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def idle(self) -> bool:
        return not self._pending and not self._writing

    def refuse(self, failure: HotStorageError) -> None:
        """Write nothing until `resume`: what a failed write left in the log is not known, and
        a later group would give its sequences and keys out again."""
        self._failure = failure

    def resume(self, store: Store, partitions: Partitions) -> None:
        """Go on with a reopened database; only after a failure, with no write under way."""
        self._store = store
        self._partitions = partitions
        self._failure = None

    def close(self) -> None:
        """Stop the thread; the caller has waited until idle."""
        self._groups.put(None)
        self._thread.join()

    def _turn(self) -> None:
        self._scheduled = False
        if self._writing or not self._pending:
            return
        appends, self._pending = self._pending, []
        if self._failure is not None:
            self._answer_all(appends, self._failure)
            return
        try:
            group = self._form(appends)
            if self._in_thread or not self._store.write_at_once(group.batch):
                if not self._in_thread:
                    group = self._form(appends)  # the same again: the attempt used the batch up
                self._writing = True
                self._groups.put(group)
                return
        except HotStorageError as error:
            self._fail(appends, error)
        except Exception as error:
            # A fault of ours must not leave the group's callers without an answer.
            self._fail(appends, HotStorageError(f"the group could not be formed: {error!r}"))
            raise
        else:
            self._complete(group, time.perf_counter() - group.started)

    def _write_groups(self) -> None:
        while (group := self._groups.get()) is not None:
            failure: HotStorageError | None = None
            started = time.perf_counter()
            try:
                self._store.write(group.batch)
            except HotStorageError as error:
                failure = error
            seconds = time.perf_counter() - started
            self._loop.call_soon_threadsafe(self._written, group, failure, seconds)
            # A batch keeps the database open, and may have to let it go for a reopen.
            del group, failure

    def _written(self, group: Group, failure: HotStorageError | None, seconds: float) -> None:
        self._writing = False
        if failure is None:
            self._complete(group, seconds)
        else:
            self._fail([*group.appends, *(append for append, _ in group.refused)], failure)
        if self._pending and not self._scheduled:
            # Here and now: the requests that came during the write have waited long enough.
            self._turn()

    def _complete(self, group: Group, seconds: float) -> None:
        events, size = 0, group.key_bytes
        for tail in group.tails:
            partition = tail.partition
            events += tail.next - 1 - partition.last
            partition.last = tail.next - 1
            size += tail.bytes_end - partition.bytes_end
            partition.bytes_end = tail.bytes_end
            partition.small += tail.blocks
            if partition.oldest_ms is None:
                partition.oldest_ms = group.ingest_ms
        partitions = [tail.partition for tail in group.tails]
        self._on_commit(Committed(events, len(group.appends), seconds, size, partitions))
        for append in group.appends:
            self._answer(append, None)
        for append, refusal in group.refused:
            self._answer(append, refusal)

    def _fail(self, appends: list[Append], error: HotStorageError) -> None:
        self._on_failure(error)
        self._answer_all(appends, error)

    def _answer_all(self, appends: list[Append], error: HotStorageError) -> None:
        for append in appends:
            self._answer(append, error)

    def _answer(self, append: Append, error: ZombiError | None) -> None:
        """Tell one caller; its trouble with the answer is not the next one's."""
        try:
            append.done(append, error)
        except Exception as trouble:
            self._loop.call_exception_handler(
                {"message": "an ack could not be delivered", "exception": trouble}
            )

    def _form(self, appends: list[Append]) -> Group:
        """Give out sequences and encode blocks; a request past a limit is told so alone."""
        known = self._look_up(appends)
        tails: defaultdict[str, dict[int, Tail]] = defaultdict(dict)
        placed: list[Append] = []
        refused: list[tuple[Append, ZombiError]] = []
        fresh: list[tuple[bytes, int]] = []
        for append in appends:
            members = tails[append.table]
            try:
                for segment in append.segments:
                    if segment.partition not in members:
                        self._begin_tails(append, members)
                        break
            except ZombiError as error:
                refused.append((append, error))
                continue
            for segment in append.segments:
                tail = members[segment.partition]
                if segment.keys is None:
                    _place(tail, segment)
                else:
                    _place_keyed(tail, segment, known, fresh)
            placed.append(append)
        started, ingest_ms = time.perf_counter(), time.time_ns() // 1_000_000
        batch = self._store.batch()
        filled = [tail for members in tails.values() for tail in members.values() if tail.segments]
        for tail in filled:
            _put_blocks(batch, tail, ingest_ms)
        key_bytes = self._put_keys(batch, fresh, ingest_ms)
        return Group(batch, placed, refused, filled, key_bytes, ingest_ms, started)

    def _begin_tails(self, append: Append, members: dict[int, Tail]) -> None:
        """Tails for the request's partitions that have none yet, or an error and no tail."""
        numbers = [segment.partition for segment in append.segments]
        for partition in self._partitions.need(append.table, numbers):
            if partition.number not in members:
                members[partition.number] = Tail(
                    partition, partition.last + 1, [], [], partition.bytes_end
                )

    def _look_up(self, appends: list[Append]) -> dict[bytes, int]:
        """Sequences of the group's idempotency keys that are stored already."""
        wanted = [
            _idempotency_prefix(append.table, segment.partition) + key
            for append in appends
            for segment in append.segments
            if segment.keys is not None
            for key in segment.keys
            if key
        ]
        if not wanted:
            return {}
        try:
            values = self._store.get_keys(wanted)
        except Exception as error:
            raise HotStorageError(f"RocksDB cannot be read: {error}") from error
        return {
            key: keys.IDEMPOTENCY_ENTRY.unpack(value)[0]
            for key, value in zip(wanted, values, strict=True)
            if value is not None
        }

    def _put_keys(self, batch: Batch, fresh: list[tuple[bytes, int]], now_ms: int) -> int:
        """Remember the keys, and in one record when all of them may be forgotten."""
        if not fresh:
            return 0
        for key, sequence in fresh:
            batch.put_key(key, keys.IDEMPOTENCY_ENTRY.pack(sequence, now_ms))
        self._expiries = (self._expiries + 1) & 0xFFFFFFFF
        names = [key for key, _ in fresh]
        batch.put(keys.expiry_key(now_ms, self._expiries), msgspec.msgpack.encode(names))
        return keys.idempotency_bytes(names)


def _place(tail: Tail, segment: Segment) -> None:
    segment.first = tail.next
    tail.next += segment.count
    tail.segments.append(segment)


def _place_keyed(
    tail: Tail, segment: Segment, known: dict[bytes, int], fresh: list[tuple[bytes, int]]
) -> None:
    """Place the events whose key is new; a duplicate gets the first one's sequence (INV-4)."""
    assert segment.keys is not None
    prefix = tail.partition.idempotency_prefix
    rows: list[int] = []
    offsets: list[int] = []
    sequence = tail.next
    for row, key in enumerate(segment.keys):
        if key:
            full = prefix + key
            earlier = known.get(full)
            if earlier is not None:
                offsets.append(earlier)
                continue
            known[full] = sequence
            fresh.append((full, sequence))
        rows.append(row)
        offsets.append(sequence)
        sequence += 1
    if len(rows) == segment.count:
        _place(tail, segment)
        return
    segment.offsets = offsets
    if rows:
        _place(tail, segment.take(rows))


def _put_blocks(batch: Batch, tail: Tail, ingest_ms: int) -> None:
    """Encode a partition's part of the group, split where a block would grow too large."""
    run: list[Segment] = []
    run_events = run_bytes = 0
    for segment in tail.segments:
        size = len(segment.payloads)
        if run and (
            run_events + segment.count > BLOCK_EVENTS_MAX or run_bytes + size > BLOCK_BYTES_MAX
        ):
            _put_block(batch, tail, run, ingest_ms)
            run, run_events, run_bytes = [], 0, 0
        run.append(segment)
        run_events += segment.count
        run_bytes += size
    _put_block(batch, tail, run, ingest_ms)


def _put_block(batch: Batch, tail: Tail, segments: list[Segment], ingest_ms: int) -> None:
    first = segments[0].first
    value = encode_block(segments, first, ingest_ms, tail.bytes_end)
    batch.put(keys.block_key(tail.partition.block_prefix, first), value)
    count, size = segments[-1].first + segments[-1].count - first, len(value) - HEADER.size
    tail.blocks.append(SmallBlock(first, count, size))
    tail.bytes_end += size
