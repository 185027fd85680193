"""Cuts: what of a table is on its way to Iceberg, and how far it has come.

A cut fixes ranges of sequences, not blocks, so merging may go on under it. It takes only
what is durable and visible: each range begins where the last cut ended and goes up to the
high watermark of the moment. Each transition is one durable batch, made under the lease's
epoch and alone among all changes, so a crash leaves the state before it or after it.
Whether the lake really holds a cut is asked by the caller, never assumed here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from zombi_platform.cuts import TRANSITIONS, Cut, CutState, Range, Split, StagedFile
from zombi_platform.errors import (
    ConflictError,
    NotFoundError,
    TransientError,
)
from zombi_platform.failpoints import failpoint
from zombi_platform.hot import keys, tombstones
from zombi_platform.hot.buffer import Change, HotBuffer
from zombi_platform.hot.cleanup import delete_flushed
from zombi_platform.hot.cut_memory import TableCuts, held_of, remember, steady, uncut
from zombi_platform.hot.cut_records import (
    cut_ids,
    cut_json,
    drop_cut,
    put_cut,
    put_files,
    read_cut,
    read_cuts,
    read_split_files,
)
from zombi_platform.hot.leases import Leases
from zombi_platform.hot.notes import Notes
from zombi_platform.hot.partitions import WATERMARK, Partition, Partitions
from zombi_platform.hot.scan import scan
from zombi_platform.hot.split_reports import check_files, find_split, no_cut, no_split
from zombi_platform.hot.splits import Span, SplitLimits, plan_splits
from zombi_platform.hot.store import Store, View
from zombi_platform.hot.tombstones import Tombstones

CUTS_MAX: Final = 10_000
"""Most cuts of a table that are not cleaned yet."""
MARK_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Reported:
    """Whose files a split has: those of this report, or another one's that came first."""

    kept: bool
    files: Sequence[StagedFile]


class Cuts:
    def __init__(
        self, hot: HotBuffer, leases: Leases, graves: Tombstones, notes: Notes, grace_secs: float
    ) -> None:
        self._hot = hot
        self._leases = leases
        self._graves = graves
        self._notes = notes
        self._grace_secs = grace_secs
        self._tables: dict[str, TableCuts] = {}
        hot.follow(self._load, self._arrived)

    # What there is

    def tables(self) -> set[str]:
        return set(self._tables)

    def of(self, table: str) -> TableCuts:
        """The table's cuts; not to be changed by the caller."""
        return self._tables.get(table) or TableCuts()

    def json(self, table: str) -> Iterator[bytes]:
        """The table's cuts with their files, as pieces of a JSON list; runs in a thread."""
        view = self._hot.view()
        separator = b"["
        for cut_id in list(cut_ids(view, table)):
            cut = read_cut(view, table, cut_id)
            assert cut is not None
            yield separator
            yield from cut_json(view, cut)
            separator = b","
        yield b"]" if separator == b"," else b"[]"

    def one_json(self, table: str, cut_id: int) -> Iterator[bytes]:
        """One cut with its files, as pieces of a JSON object; runs in a thread."""
        view = self._hot.view()
        cut = read_cut(view, table, cut_id)
        if cut is None:
            raise no_cut(table, cut_id)
        yield from cut_json(view, cut)

    def read_split(self, table: str, cut_id: int, number: int) -> Iterator[pa.RecordBatch]:
        """The events of a split, all of them or an error; runs in a thread."""
        view = self._hot.view()
        cut = read_cut(view, table, cut_id)
        if cut is None:
            raise no_cut(table, cut_id)
        return self._scan(view, table, find_split(cut, number).ranges)

    def _scan(self, view: View, table: str, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        for part in ranges:
            member = self._hot.partitions.find(table, part.partition)
            if member is None:
                raise NotFoundError(f"table {table!r} has no partition {part.partition}")
            yield from scan(view, member, part.first, part.last)

    # Transitions

    async def open(self, table: str, epoch: int, limits: SplitLimits) -> int | None:
        """The id of the open cut, made now if there is something new; else None."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            state = self._tables.get(table) or TableCuts()
            if state.open is not None:
                return state.open.id
            if len(state.held) >= CUTS_MAX:
                raise TransientError(
                    f"table {table!r} has {CUTS_MAX} cuts that are not cleaned; clean them first",
                    code="TOO_MANY_CUTS",
                )
            # Read in one go: the partition's end and the bytes up to it belong together.
            spans = [
                Span(member, member.cut + 1, member.last, member.cut_bytes, member.bytes_end)
                for member in self._hot.partitions.known(table)
                if member.last > member.cut
            ]
            if not spans:
                return None
            age_secs = 0.0 if state.since is None else time.monotonic() - state.since
            cut_id = state.last_id + 1
            cut = await change.run(_record_cut, table, cut_id, spans, limits, age_secs)
            self._take(state, cut, spans)
            self._tables[table] = state
            failpoint("cut.recorded")
            return cut.id

    def _take(self, state: TableCuts, cut: Cut, spans: Sequence[Span]) -> None:
        """Remember a recorded cut."""
        ends = cut.ends
        state.last_id = cut.id
        state.open = cut
        state.held[cut.id] = held_of(cut)
        state.since = None
        for span in spans:
            member, end = span.partition, ends.get(span.partition.number)
            if end is not None:
                member.cut = end
                share = (end - span.first + 1) / (span.last - span.first + 1)
                member.cut_bytes = span.start + int((span.end - span.start) * share)
            if member.cut < member.last:
                state.since = time.monotonic()

    async def intend(
        self, table: str, epoch: int, cut_id: int, number: int, paths: Sequence[str]
    ) -> None:
        """Put tombstones of files that are about to be written for a split."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            held = self.of(table).held.get(cut_id)
            if held is None:
                raise no_cut(table, cut_id)
            if not 0 <= number < held.splits:
                raise no_split(table, cut_id, number)
            due_ms = self._graves.now_ms(table) + int(self._grace_secs * 1000)
            await change.run(_record_intent, table, cut_id, number, paths, due_ms)

    async def report(
        self, table: str, epoch: int, cut_id: int, number: int, files: Sequence[StagedFile]
    ) -> Reported:
        """Record the files of a split; the first word is kept."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            state = self._tables.get(table) or TableCuts()
            if cut_id not in state.held:
                raise no_cut(table, cut_id)
            first = await change.run(read_split_files, table, cut_id, number)
            if first is not None:
                return await self._second_word(change, table, first, files)
            cut = state.open
            if cut is None or cut.id != cut_id:
                raise no_split(table, cut_id, number)
            check_files(find_split(cut, number), files)
            held = state.held[cut_id]
            whole = len(held.staged) + 1 == held.splits
            now_ms = self._graves.now_ms(table)
            await change.run(_record_files, cut, number, files, whole, now_ms)
            held.staged.add(number)
            held.files += len(files)
            held.file_bytes += sum(file.bytes for file in files)
            if whole:
                held.state, state.open = CutState.STAGED, None
            failpoint("split.recorded")
            return Reported(True, files)

    async def _second_word(
        self, change: Change, table: str, first: list[StagedFile], files: Sequence[StagedFile]
    ) -> Reported:
        kept = {file.path for file in first}
        strays = [file.path for file in files if file.path not in kept]
        if not strays and len(files) == len(first):
            return Reported(True, first)
        due_ms = self._graves.now_ms(table) + int(self._grace_secs * 1000)
        await change.run(_record_strays, table, strays, due_ms)
        return Reported(False, first)

    def staged(self, table: str, ids: Sequence[int]) -> list[int]:
        """Those of the ids that are to be committed next; all before them must be committed."""
        state = self.of(table)
        for cut_id in ids:
            if cut_id not in state.held:
                raise no_cut(table, cut_id)
            if state.held[cut_id].state is CutState.OPEN:
                raise ConflictError(f"cut {cut_id} of table {table!r} is not staged yet")
        waiting = [held.id for held in state.held.values() if held.state is not CutState.COMMITTED]
        wanted = [cut_id for cut_id in waiting if cut_id in set(ids)]
        if wanted != waiting[: len(wanted)]:
            raise ConflictError(
                f"cut {waiting[0]} of table {table!r} comes before cut {wanted[0]} and is not "
                "committed yet"
            )
        return wanted

    async def read(self, table: str, ids: Sequence[int]) -> list[Cut]:
        """These cuts, without their files."""
        async with self._hot.changing() as change:
            found = [await change.run(read_cut, table, cut_id) for cut_id in ids]
        return [cut for cut in found if cut is not None]

    async def commit(
        self, table: str, epoch: int | None, snapshots: Mapping[int, int | None]
    ) -> None:
        """Record that the lake holds these cuts, each in its snapshot; the caller has looked.

        Without an epoch it is the gateway itself that looked a lost outcome up.
        """
        async with self._hot.changing() as change:
            if epoch is not None:
                self._leases.require(table, epoch)
            state = self._tables.get(table) or TableCuts()
            waiting = self.staged(table, list(snapshots))
            cuts = [await change.run(read_cut, table, cut_id) for cut_id in waiting]
            done = [_committed(cut, snapshots[cut.id]) for cut in cuts if cut is not None]
            if not done:
                return
            ends = {number: end for cut in done for number, end in cut.ends.items()}
            members = {member.number: member for member in self._hot.partitions.known(table)}
            flushed = {number: member.flushed for number, member in members.items()} | ends
            batch = change.store.batch()
            for number, end in ends.items():
                suffix = keys.partition_suffix(table, number)
                batch.put(keys.FLUSH_WATERMARKS + suffix, WATERMARK.pack(end))
            for cut in done:
                put_cut(batch, cut)
            settled = self._notes.settle(batch, table, flushed)
            await change.run(Store.write_surely, batch)
            for number, end in ends.items():
                members[number].flushed = end
            for cut in done:
                held = state.held[cut.id]
                held.state, held.committed = cut.state, time.monotonic()
                held.snapshot_id = state.snapshot_id = cut.snapshot_id
                state.files_committed += held.files
            self._notes.forget(table, settled)
            failpoint("commit.recorded")

    def cleanable(self, table: str, retention_secs: float) -> tuple[list[int], float]:
        """Committed cuts past their retention, and seconds until the next one is."""
        now = time.monotonic()
        ids: list[int] = []
        for held in self.of(table).held.values():
            if held.committed is None:
                break
            if held.committed + retention_secs > now:
                return ids, held.committed + retention_secs - now
            ids.append(held.id)
        return ids, 0.0

    async def clean(self, table: str, epoch: int, ids: Sequence[int]) -> int:
        """Delete the events of committed cuts and forget the cuts; the caller has verified."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            state = self._tables.get(table) or TableCuts()
            ids = [cut_id for cut_id in ids if cut_id in state.held]
            cuts = [await change.run(read_cut, table, cut_id) for cut_id in ids]
            ends = {n: end for cut in cuts if cut is not None for n, end in cut.ends.items()}
            batch = change.store.batch()
            for cut_id in ids:
                drop_cut(batch, table, cut_id)
            settled = self._notes.settle(batch, table, {})
            deleted = await delete_flushed(self._hot, change, batch, table, ends)
            for cut_id in ids:
                del state.held[cut_id]
            self._notes.forget(table, settled)
            failpoint("clean.deleted")
            return deleted

    async def begin_above(self, table: str, cut_id: int) -> None:
        """Give out no cut id that the lake has seen already."""
        async with self._hot.changing() as change:
            state = self._tables.setdefault(table, TableCuts())
            if cut_id > state.last_id:
                batch = change.store.batch()
                batch.put(keys.CUT_IDS + table.encode(), WATERMARK.pack(cut_id))
                await change.run(Store.write_surely, batch)
                state.last_id = cut_id

    # Memory

    def _load(self, store: Store, partitions: Partitions) -> None:
        tables: dict[str, TableCuts] = {}
        for key, value in store.items(keys.CUT_IDS):
            name = key[len(keys.CUT_IDS) :].decode()
            tables[name] = TableCuts(last_id=WATERMARK.unpack(value)[0])
        for cut in read_cuts(store):
            remember(tables.setdefault(cut.table, TableCuts()), store, cut)
        ends: dict[tuple[str, int], int] = {}
        for cut in read_cuts(store):
            ends.update(((cut.table, number), end) for number, end in cut.ends.items())
        for member in partitions:
            member.cut = max(member.flushed, ends.get((member.table, member.number), 0))
            member.cut_bytes, arrived_ms = uncut(store, member)
            if arrived_ms is not None:
                state = tables.setdefault(member.table, TableCuts())
                since = steady(arrived_ms)
                state.since = since if state.since is None else min(state.since, since)
        self._tables = tables

    def _arrived(self, partitions: Set[Partition]) -> None:
        now = time.monotonic()
        for member in partitions:
            if member.last > member.cut:
                state = self._tables.setdefault(member.table, TableCuts())
                if state.since is None:
                    state.since = now


def _record_cut(
    store: Store,
    table: str,
    cut_id: int,
    spans: Sequence[Span],
    limits: SplitLimits,
    age_secs: float,
) -> Cut:
    now_ms = time.time_ns() // 1_000_000
    splits = plan_splits(store.view(), spans, limits)
    cut = Cut(
        table=table,
        id=cut_id,
        state=CutState.OPEN,
        created_ms=now_ms,
        oldest_ms=now_ms - int(age_secs * 1000),
        ranges=_joined(splits),
        splits=tuple(splits),
        mark=secrets.token_hex(MARK_BYTES),
    )
    # The lake must never be ahead of what a crash leaves here.
    store.secure()
    batch = store.batch()
    put_cut(batch, cut)
    batch.put(keys.CUT_IDS + table.encode(), WATERMARK.pack(cut_id))
    store.write_surely(batch)
    return cut


def _joined(splits: Sequence[Split]) -> tuple[Range, ...]:
    """The splits' ranges, one for each partition."""
    joined: dict[int, Range] = {}
    for part in (part for split in splits for part in split.ranges):
        before = joined.get(part.partition)
        joined[part.partition] = part if before is None else replace(before, last=part.last)
    return tuple(joined.values())


def _record_files(
    store: Store, cut: Cut, number: int, files: Sequence[StagedFile], whole: bool, now_ms: int
) -> None:
    batch = store.batch()
    tombstones.adopt(store, batch, cut.table, [file.path for file in files], now_ms)
    put_files(batch, cut, number, files)
    if whole:
        put_cut(batch, _moved(cut, CutState.STAGED))
    store.write_surely(batch)


def _record_intent(
    store: Store, table: str, cut_id: int, number: int, paths: Sequence[str], due_ms: int
) -> None:
    """Tombstones for the paths, but never for a file that the cut holds already."""
    first = read_split_files(store, table, cut_id, number) or []
    kept = {file.path for file in first}
    _record_strays(store, table, [path for path in paths if path not in kept], due_ms)


def _record_strays(store: Store, table: str, paths: Sequence[str], due_ms: int) -> None:
    batch = store.batch()
    tombstones.put(store, batch, table, paths, due_ms)
    store.write_surely(batch)


def _committed(cut: Cut, snapshot_id: int | None) -> Cut:
    now_ms = time.time_ns() // 1_000_000
    moved = _moved(cut, CutState.COMMITTED)
    return replace(moved, snapshot_id=snapshot_id, committed_ms=now_ms)


def _moved(cut: Cut, state: CutState) -> Cut:
    if state not in TRANSITIONS[cut.state]:
        raise ConflictError(f"cut {cut.id} of {cut.table!r} is {cut.state}, it cannot be {state}")
    return replace(cut, state=state)
