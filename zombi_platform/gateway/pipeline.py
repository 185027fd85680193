"""The gateway's side of the way to Iceberg: what is where, what is due, who works on it.

Holds what the hot buffer remembers of it together and answers for all tables at once, from
memory. It does no work of the pipeline itself; workers call the routes.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from zombi_platform.cuts import CutState
from zombi_platform.gateway.thresholds import Facts, TableThresholds, Thresholds, due
from zombi_platform.hot import HotBuffer
from zombi_platform.hot.cuts import Cuts, Held
from zombi_platform.hot.leases import Leases
from zombi_platform.hot.notes import Failure, FlushRequest, Notes, Registration
from zombi_platform.hot.splits import SplitLimits
from zombi_platform.hot.tombstones import Tombstones, count_due
from zombi_platform.progress import (
    CutProgress,
    FailureReport,
    LeaseProgress,
    Marks,
    RegistrationProgress,
    TableProgress,
)
from zombi_platform.settings import Settings


class Pipeline:
    def __init__(self, settings: Settings, hot: HotBuffer) -> None:
        self.settings = settings
        self.hot = hot
        self.thresholds = TableThresholds(settings)
        self.leases = Leases(hot, settings.lease_secs)
        self.notes = Notes(hot)
        self.tombstones = Tombstones(hot, self.leases)
        self.cuts = Cuts(hot, self.leases, self.tombstones, self.notes, settings.delete_grace_secs)
        self._called = time.monotonic()

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
            lake=None,
        )

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
