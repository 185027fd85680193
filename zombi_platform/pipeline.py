"""From hot to Iceberg: the steps of a flush, each of which may be repeated.

Lease, cut, stage, commit, report, clean, merge: every step asks the gateway how far the table has
come and does what is missing, so a step that died is simply run again, here or by another
worker. The lease keeps two workers from doing the same work; what makes it harmless when
they do is the fence in the lake (INV-10). `zombi flush` and the Dagster assets call these
same steps.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import Cut, CutState
from zombi_platform.engines import Engine, MergingJob, SplitResult, StagingJob, open_engine
from zombi_platform.errors import ConflictError, FencedError, TransientError, ZombiError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.commit import Commit
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.registration import ExternalCatalog
from zombi_platform.lake.replacement import Replacement
from zombi_platform.lake.small_files import MergedFile
from zombi_platform.settings import Settings

RENEWALS_PER_LEASE: Final = 3
SWEEP_PAGES_MAX: Final = 1000

log = logging.getLogger("zombi.pipeline")


@dataclass(frozen=True, slots=True)
class Staged:
    """A cut whose every split is a file, and what making them took."""

    cut: Cut
    seconds: float


@dataclass(frozen=True, slots=True)
class Committed:
    """Cuts that are in the lake, verified by the gateway."""

    cuts: tuple[Cut, ...]
    commit: Commit
    seconds: float

    @property
    def events(self) -> int:
        return sum(cut.events for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class Cleaned:
    deleted_events: int
    remaining_events: int
    deleted_files: int


@dataclass(frozen=True, slots=True)
class Merged:
    """Small files that became fewer, and how long that took."""

    replacement: Replacement
    seconds: float


@dataclass(frozen=True, slots=True)
class Flushed:
    """What one flush of a table came to."""

    table: str
    engine: str
    events: int
    files: int
    bytes: int
    snapshot_id: int | None
    remaining_events: int
    merged_files: int
    """Small files of this and earlier flushes that became fewer."""
    stage_secs: float
    commit_secs: float
    seconds: float


class Watch:
    """Is told how a flush comes along. This one looks away; others override what they show."""

    def step(self, table: str, name: str) -> None:
        """A step of the table begins."""

    def cut(self, cut: Cut) -> None:
        """These splits are staged next."""

    def split(self, result: SplitResult) -> None:
        """One split is staged."""


class Pipeline:
    """What a worker needs for any table; made once for a process."""

    def __init__(
        self, settings: Settings, gateway: PipelineClient, lake: Lake, engine: Engine
    ) -> None:
        self.settings = settings
        self.gateway = gateway
        self.lake = lake
        self.engine = engine
        self.external = ExternalCatalog(settings, lake) if settings.catalog_url else None

    @classmethod
    @contextmanager
    def opened(cls, settings: Settings) -> Iterator[Pipeline]:
        with PipelineClient(settings.url, settings.token) as gateway:
            engine = open_engine(settings)
            try:
                yield cls(settings, gateway, Lake(settings), engine)
            finally:
                engine.close()

    @contextmanager
    def leased(self, table: str, holder: str | None = None) -> Iterator[TableWork]:
        """The table's steps, for as long as this worker alone may take them."""
        work = TableWork(self, table, holder or new_holder())
        try:
            yield work
        except ZombiError as error:
            work.check_lease(error)
            work.tell(error)
            raise
        finally:
            work.release()

    def flush(self, table: str, watch: Watch | None = None) -> Flushed:
        """Bring everything that was acked before this call into the lake."""
        started = time.perf_counter()
        watch = watch or Watch()
        with self.leased(table) as work:
            watch.step(table, "staging")
            staged = work.stage_all(watch)
            watch.step(table, "committing")
            committed = work.commit()
            watch.step(table, "cleaning")
            cleaned = work.clean()
            watch.step(table, "merging")
            merged = work.try_to_merge()
            work.register()
        return Flushed(
            table=table,
            engine=self.engine.name,
            events=committed.events if committed else 0,
            files=sum(len(cut.files) for cut in committed.cuts) if committed else 0,
            bytes=sum(f.bytes for cut in committed.cuts for f in cut.files) if committed else 0,
            snapshot_id=committed.commit.snapshot_id if committed else None,
            remaining_events=cleaned.remaining_events,
            merged_files=merged.replacement.files_before if merged else 0,
            stage_secs=sum(part.seconds for part in staged),
            commit_secs=committed.seconds if committed else 0.0,
            seconds=time.perf_counter() - started,
        )


class TableWork:
    """The steps of one table under one lease. A lost lease ends them with FencedError."""

    def __init__(self, pipeline: Pipeline, table: str, holder: str) -> None:
        self.table = table
        self._settings = pipeline.settings
        self._gateway = pipeline.gateway
        self._lake = pipeline.lake
        self._engine = pipeline.engine
        self._external = pipeline.external
        self._lease = self._gateway.lease(table, holder)
        self._step = "lease"
        self._lost: ZombiError | None = None
        self._over = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()

    # Steps, in their order

    def open_cut(self) -> Cut | None:
        """The cut to stage next; None when every acked event is in one already."""
        self._begin("cut")
        return self._gateway.open_cut(self.table, self._lease.epoch)

    def stage(self, cut: Cut, watch: Watch | None = None) -> Staged:
        """Make files of the cut's splits that have none yet."""
        self._begin("stage")
        started = time.perf_counter()
        watch = watch or Watch()
        if cut.state is CutState.OPEN:
            watch.cut(cut)
            job = StagingJob.of(self._settings, self._lake.storage, cut, self._lease.epoch)
            self._engine.stage(job, cut.missing, watch.split)
            failpoint("pipeline.staged")
            cut = self._find(cut.id)
        return Staged(cut, time.perf_counter() - started)

    def stage_all(self, watch: Watch | None = None) -> list[Staged]:
        """Stage everything that was acked before this call.

        A cut that was open already may have been taken long ago, so one more follows it;
        later events wait for the next flush, or a busy table would never come to an end.
        """
        left_open = any(cut.state is CutState.OPEN for cut in self.cuts())
        staged: list[Staged] = []
        for _ in range(2 if left_open else 1):
            cut = self.open_cut()
            if cut is not None:
                staged.append(self.stage(cut, watch))
        return staged

    def commit(self) -> Committed | None:
        """Bring all staged cuts into the lake in one snapshot and have the gateway verify it."""
        self._begin("commit")
        started = time.perf_counter()
        staged = [cut for cut in self.cuts() if cut.state is CutState.STAGED]
        if not staged:
            return None
        failpoint("pipeline.committing")
        commit = self._lake.commit(self.table, staged, before_write=self._tombstone)
        failpoint("pipeline.committed")
        ids = [cut.id for cut in staged]
        self._gateway.report_commit(self.table, self._lease.epoch, ids)
        failpoint("pipeline.reported")
        return Committed(tuple(staged), commit, time.perf_counter() - started)

    def clean(self) -> Cleaned:
        """Delete what the gateway finds in the lake from the hot buffer, then sweep the lake."""
        self._begin("clean")
        answer = self._gateway.clean(self.table, self._lease.epoch)
        failpoint("pipeline.cleaned")
        return Cleaned(answer.deleted_events, answer.remaining_events, self._sweep())

    def merge(self) -> Merged | None:
        """Make few files of the small ones that flushes have left, if they are many by now."""
        self._begin("merge")
        started = time.perf_counter()
        plan = self._lake.plan_merge(self.table)
        if plan is None:
            return None
        merged: list[MergedFile] = []
        job = MergingJob.of(
            self._settings, self._lake.storage, self.table, plan.base, self._lease.epoch
        )
        failure: ZombiError | None = None
        try:
            self._engine.merge(job, plan.groups, merged.append)
        except ZombiError as error:
            failure = error  # of one group; what was made of the others counts
        failpoint("pipeline.merging")
        replacement = self._lake.replace(plan, merged, before_write=self._tombstone)
        failpoint("pipeline.merged")
        if failure is not None:
            raise failure
        if replacement is None:
            return None
        return Merged(replacement, time.perf_counter() - started)

    def try_to_merge(self) -> Merged | None:
        """Merge; trouble with it is shown, but stops nothing: every event is where it was."""
        try:
            return self.merge()
        except ZombiError as error:
            log.warning("small files of %s were not merged: %s", self.table, error)
            return None

    def register(self) -> None:
        """Bring an external catalog up to date; its trouble is shown, but stops nothing."""
        if self._external is None:
            return
        try:
            shown = self._external.bring_up_to_date(self.table)
        except ZombiError as error:
            log.warning("the external catalog lags behind for %s: %s", self.table, error)
            self._gateway.report_registration(self.table, None, str(error))
        else:
            self._gateway.report_registration(self.table, shown.commit_id)

    def cuts(self) -> Sequence[Cut]:
        return self._gateway.cuts(self.table)

    # The lease

    def check_lease(self, error: ZombiError) -> None:
        """Raise FencedError if that is behind the error: one overtaken meets all sorts of them."""
        if isinstance(error, FencedError):
            raise error
        try:
            self._gateway.renew(self._lease)
        except ConflictError as lost:
            raise FencedError(
                f"another worker has taken table {self.table!r} over: {lost}"
            ) from error
        except ZombiError as trouble:
            log.info("the lease of %s could not be looked at: %s", self.table, trouble)

    def tell(self, error: ZombiError) -> None:
        """Let the gateway show why the table stands still."""
        try:
            self._gateway.report_failure(
                self.table,
                str(error),
                error.code,
                self._step,
                transient=isinstance(error, TransientError),
            )
        except ZombiError as unheard:
            log.warning("the gateway could not be told about %s: %s", self.table, unheard)

    def release(self) -> None:
        self._over.set()
        self._renewing.join()
        try:
            self._gateway.release(self._lease)
        except ZombiError as error:
            # It ends by itself; whoever comes next waits for that.
            log.info("the lease of %s could not be given back: %s", self.table, error)

    def _renew(self) -> None:
        while not self._over.wait(self._lease.ttl_secs / RENEWALS_PER_LEASE):
            try:
                self._gateway.renew(self._lease)
            except TransientError as error:
                log.warning("the lease of %s could not be renewed: %s", self.table, error)
            except ZombiError as error:
                self._lost = error
                return

    def _begin(self, step: str) -> None:
        self._step = step
        if self._lost is not None:
            raise FencedError(
                f"another worker has taken table {self.table!r} over: {self._lost}"
            ) from self._lost

    def _find(self, cut_id: int) -> Cut:
        for cut in self.cuts():
            if cut.id == cut_id:
                return cut
        raise FencedError(f"cut {cut_id} of {self.table!r} was finished by another worker")

    def _tombstone(self, paths: Sequence[str], prefixes: Sequence[str]) -> None:
        self._gateway.add_tombstones(self.table, self._lease.epoch, paths, prefixes)

    def _sweep(self) -> int:
        """Delete files in the lake whose tombstone is due; returns how many.

        Not while a cut waits for its commit: a worker that lost its lease may be about to
        commit it with manifests that have tombstones, and only our own commit stops it.
        """
        if any(cut.state is CutState.STAGED for cut in self.cuts()):
            return 0
        deleted, after = 0, None
        for _ in range(SWEEP_PAGES_MAX):
            due = self._gateway.tombstones(self.table, after)
            if due.paths or due.prefixes:
                swept = self._lake.sweep(self.table, due.paths, due.prefixes)
                deleted += len(swept.deleted)
                if swept.waiting:
                    self._tombstone(swept.waiting, ())
                done = [path for path in due.paths if path not in set(swept.waiting)]
                self._gateway.drop_tombstones(self.table, self._lease.epoch, done, due.prefixes)
            after = due.next
            if after is None:
                break
        return deleted


def new_holder() -> str:
    """A name for a worker that no other worker has."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
