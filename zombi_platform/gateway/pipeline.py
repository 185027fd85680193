"""The gateway's side of the way to Iceberg: what is where, what is due, who works on it.

Holds what the hot buffer remembers of it together and answers for all tables at once, from
memory. It does no work of the pipeline itself; workers call the routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from zombi_platform.cuts import Cut, CutState
from zombi_platform.errors import TransientError
from zombi_platform.failpoints import failpoint
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.thresholds import Facts, TableThresholds, Thresholds, due
from zombi_platform.hot import HotBuffer
from zombi_platform.hot.cut_memory import Held
from zombi_platform.hot.cuts import Cuts
from zombi_platform.hot.leases import Leases
from zombi_platform.hot.notes import Failure, FlushRequest, Notes, Registration
from zombi_platform.hot.splits import SplitLimits
from zombi_platform.hot.tombstones import Tombstones, count_due
from zombi_platform.lake.state import LakeState, Verified, verify
from zombi_platform.progress import (
    Cleaned,
    Committed,
    CutProgress,
    FailureReport,
    FlushAnswer,
    LakeProgress,
    LeaseProgress,
    Marks,
    RegistrationProgress,
    TableProgress,
)
from zombi_platform.settings import Settings

CLEANED_AT_ONCE: Final = 100
"""Cuts that are verified and deleted together."""


class Pipeline:
    def __init__(self, settings: Settings, hot: HotBuffer, lake: LakeView) -> None:
        self.settings = settings
        self.hot = hot
        self.lake = lake
        self.thresholds = TableThresholds(settings)
        self.leases = Leases(hot, settings.lease_secs)
        self.notes = Notes(hot)
        self.tombstones = Tombstones(hot, self.leases)
        self.cuts = Cuts(hot, self.leases, self.tombstones, self.notes, settings.delete_grace_secs)
        self._called = time.monotonic()
        self._moved = asyncio.Condition()
        self._stopping = False

    def called(self) -> None:
        """A worker, or what starts workers, has been heard of."""
        self._called = time.monotonic()

    @property
    def silent_secs(self) -> float:
        """Since when no worker called, or since the start."""
        return time.monotonic() - self._called

    def split_limits(self, table: str) -> SplitLimits:
        limits = self.thresholds.of(table)
        return SplitLimits(limits.target_file_size_mb * 2**20, limits.flush_max_segment)

    def tables(self) -> list[str]:
        """Every table that holds events or has something left to do."""
        known = {name for name, members in self.hot.partitions.tables.items() if members}
        return sorted(known | self.cuts.tables() | self.notes.tables())

    def count_tombstones(self, tables: Collection[str]) -> dict[str, int]:
        """Due tombstones by table; runs in a thread."""
        view = self.hot.view()
        return {table: count_due(view, table, self.tombstones.now_ms(table)) for table in tables}

    def progress(self, table: str, tombstones_due: int) -> TableProgress:
        members = self.hot.partitions.known(table)
        limits = self.thresholds.of(table)
        facts = self._facts(table, limits)
        verdict = due(facts, limits)
        lease = self.leases.holding(table)
        seen = self.lake.seen.get(table)
        arrivals = [member.oldest_ms for member in members if member.oldest_ms is not None]
        return TableProgress(
            table=table,
            events=sum(member.events for member in members),
            bytes=sum(member.bytes for member in members),
            oldest_age_secs=_age_secs(min(arrivals)) if arrivals else None,
            unflushed_events=facts.unflushed_events,
            unflushed_bytes=facts.unflushed_bytes,
            cuts=tuple(_cut_progress(held) for held in self.cuts.of(table).held.values()),
            cut_due=verdict.cut,
            commit_due=verdict.commit,
            clean_due=verdict.clean,
            reasons=verdict.reasons,
            requested=facts.requested,
            tombstones_due=tombstones_due,
            lease=None
            if lease is None
            else LeaseProgress(lease.holder, lease.epoch, lease.expires_in_secs),
            failure=self.failure(table),
            watermarks={
                member.number: Marks(member.last, member.flushed, member.cleaned)
                for member in members
            },
            lag_secs=self.lag_secs(table),
            registration=self._registration(table),
            lake=None if seen is None else LakeProgress(seen.snapshot_id, seen.metadata_location),
        )

    async def commit(self, table: str, epoch: int, ids: Sequence[int]) -> Committed:
        """Record cuts as committed after the lake itself has been asked."""
        self.leases.require(table, epoch)
        waiting = self.cuts.staged(table, ids)
        if waiting:
            cuts = await self.cuts.read(table, waiting)
            verified = await self.lake.verify(table, cuts)
            failpoint("commit.verified")
            await self._record(table, epoch, verified)
        members = self.hot.partitions.known(table)
        return Committed(
            committed=tuple(ids),
            snapshot_id=self.cuts.of(table).snapshot_id,
            watermarks={member.number: member.flushed for member in members},
        )

    async def reconcile(self, table: str, state: LakeState) -> None:
        """Record what the lake holds of staged cuts: an outcome that was lost is looked up."""
        waiting = [h.id for h in self.cuts.of(table).held.values() if h.state is CutState.STAGED]
        found: list[Cut] = []
        for cut in await self.cuts.read(table, waiting):
            if any(state.watermarks.get(p, 0) < end for p, end in cut.ends.items()):
                break
            found.append(cut)
        if found:
            await self._record(table, None, verify(state, found))

    async def _record(self, table: str, epoch: int | None, verified: Verified) -> None:
        await self.cuts.commit(table, epoch, verified.snapshots)
        await self._wake()

    async def stop_waiting(self) -> None:
        """The gateway stops: whoever waits for a flush is told how far it has come."""
        self._stopping = True
        await self._wake()

    async def _wake(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def clean(self, table: str, epoch: int) -> Cleaned:
        """Delete what is committed and past its retention, after the lake was asked again."""
        self.leases.require(table, epoch)
        retention_secs = self.thresholds.of(table).hot_retention_secs
        ids, wait_secs = self.cuts.cleanable(table, retention_secs)
        deleted = 0
        for start in range(0, len(ids), CLEANED_AT_ONCE):
            chunk = ids[start : start + CLEANED_AT_ONCE]
            await self.lake.verify(table, await self.cuts.read(table, chunk))
            failpoint("clean.verified")
            deleted += await self.cuts.clean(table, epoch, chunk)
        remaining = sum(member.events for member in self.hot.partitions.known(table))
        return Cleaned(deleted, remaining, wait_secs)

    async def flush(self, table: str, wait_secs: float) -> FlushAnswer:
        """Have everything that is acked now committed, and wait for it."""
        marks = self.hot.watermarks(table)
        wanted = {n: m.high_watermark for n, m in marks.items()}
        files = self.cuts.of(table).files_committed
        if not self._flushed(table, wanted):
            await self.notes.request_flush(table, wanted)
            if self.silent_secs >= self.settings.pipeline_silence_secs:
                raise TransientError(
                    f"no pipeline has called for {self.silent_secs:.0f} s; the request is kept "
                    "for the next one: start it with `zombi up`, or run `zombi flush`",
                    code="NO_PIPELINE",
                    retry_after_secs=5,
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_secs), self._moved:
                    await self._moved.wait_for(
                        lambda: self._stopping or self._flushed(table, wanted)
                    )
        now = self.hot.watermarks(table)
        return FlushAnswer(
            status="flushed" if self._flushed(table, wanted) else "in_progress",
            table=table,
            events_flushed=sum(
                min(now[n].flush_watermark, high) - marks[n].flush_watermark
                for n, high in wanted.items()
            ),
            segments_written=self.cuts.of(table).files_committed - files,
            snapshot_id=self.cuts.of(table).snapshot_id,
        )

    def _flushed(self, table: str, wanted: Mapping[int, int]) -> bool:
        marks = self.hot.watermarks(table)
        return all(marks[number].flush_watermark >= high for number, high in wanted.items())

    def lag_secs(self, table: str) -> float:
        """Age of the oldest event that is not in Iceberg."""
        cuts = self.cuts.of(table)
        waiting = [held.since for held in cuts.held.values() if held.committed is None]
        moments = waiting if cuts.since is None else [*waiting, cuts.since]
        return time.monotonic() - min(moments) if moments else 0.0

    def failure(self, table: str) -> FailureReport | None:
        found = self.notes.find(Failure, table)
        if found is None:
            return None
        return FailureReport(
            error=found.error,
            code=found.code,
            step=found.step,
            transient=found.transient,
            at_ms=found.at_ms,
            run_id=found.run_id,
            url=found.url,
        )

    def _registration(self, table: str) -> RegistrationProgress | None:
        found = self.notes.find(Registration, table)
        if found is None:
            return None
        newest = self.cuts.of(table).snapshot_id
        lag = found.error is not None or (newest is not None and newest != found.snapshot_id)
        return RegistrationProgress(found.snapshot_id, lag, found.error)

    def _facts(self, table: str, limits: Thresholds) -> Facts:
        members = self.hot.partitions.known(table)
        cuts = self.cuts.of(table)
        staged = [held for held in cuts.held.values() if held.state is CutState.STAGED]
        uncut = [member for member in members if member.last > member.cut]
        return Facts(
            unflushed_events=sum(member.last - member.cut for member in uncut),
            unflushed_bytes=sum(member.bytes_end - member.cut_bytes for member in uncut),
            unflushed_age_secs=_since_secs(cuts.since),
            requested=self.notes.find(FlushRequest, table) is not None,
            open_cut=cuts.open is not None,
            staged_cuts=len(staged),
            staged_files=sum(held.files for held in staged),
            staged_bytes=sum(held.file_bytes for held in staged),
            staged_age_secs=_since_secs(min([held.since for held in staged], default=None)),
            cleanable_cuts=len(self.cuts.cleanable(table, limits.hot_retention_secs)[0]),
        )


def _cut_progress(held: Held) -> CutProgress:
    return CutProgress(
        id=held.id,
        state=held.state,
        events=held.events,
        bytes=held.bytes,
        splits=held.splits,
        staged_splits=len(held.staged),
        files=held.files,
        file_bytes=held.file_bytes,
        age_secs=_since_secs(held.since),
    )


def _age_secs(at_ms: int) -> float:
    """By the wall clock, which may have been turned back since."""
    return max(time.time() - at_ms / 1000, 0.0)


def _since_secs(since: float | None) -> float:
    return 0.0 if since is None else time.monotonic() - since
