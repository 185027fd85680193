"""The pipeline for one run: leases that go from step to step, and faults as Dagster wants them.

A transient fault is raised as it is, so that the asset's RetryPolicy repeats the step; any
other ends the run at once, without a retry. Either way the gateway is told, so that the
table's status shows it. A lease that somebody else holds is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import dagster as dg

from zombi_platform.errors import ConflictError, FencedError, TransientError, ZombiError
from zombi_platform.pipeline import Pipeline, TableWork
from zombi_platform.progress import TableProgress

RETRIES: Final = dg.RetryPolicy(
    max_retries=3, delay=2, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS
)
LEASE_HELD: Final = "LEASE_HELD"
LEASE_TRIES_MAX: Final = 20
LEASE_WAIT_SECS: Final = 5

log = logging.getLogger("zombi.defs")


class Worker:
    def __init__(self, pipeline: Pipeline, run_id: str, root_run_id: str) -> None:
        self.pipeline = pipeline
        self._run_id = run_id
        # One name for a run and its retries: a retry need not wait for its dead predecessor.
        self._holder = f"dagster:{root_run_id}"
        self._works: dict[str, TableWork] = {}

    @contextmanager
    def step(self, table: str, name: str, *, told: bool = True) -> Iterator[TableWork]:
        """One step of a table under its lease; unless `told`, the gateway hears of no failure."""
        try:
            if table not in self._works:
                self._works[table] = TableWork(self.pipeline, table, self._holder)
            yield self._works[table]
        except ZombiError as error:
            fault = self._behind(table, error)
            self.give_back(table)
            if told:
                self._tell(table, name, fault)
            raise as_dagster_wants(fault) from error

    def progress(self, table: str) -> TableProgress:
        """How far the gateway says the table has come."""
        for progress in self.pipeline.gateway.tables():
            if progress.table == table:
                return progress
        raise ConflictError(f"the gateway has nothing to flush of table {table!r}")

    def give_back(self, table: str) -> None:
        work = self._works.pop(table, None)
        if work is not None:
            work.release()

    def close(self) -> None:
        for table in list(self._works):
            self.give_back(table)

    def _behind(self, table: str, error: ZombiError) -> ZombiError:
        """A lost lease, if that is the reason; one that was overtaken meets all sorts of errors."""
        try:
            if table in self._works:
                self._works[table].check_lease(error)
        except FencedError as lost:
            return lost
        return error

    def _tell(self, table: str, step: str, error: ZombiError) -> None:
        if isinstance(error, FencedError) or error.code == LEASE_HELD:
            return  # another worker is at it, which is nobody's failure
        try:
            self.pipeline.gateway.report_failure(
                table,
                str(error),
                error.code,
                step,
                transient=isinstance(error, TransientError),
                run_id=self._run_id,
                url=run_url(self.pipeline.settings.dagster_port, self._run_id),
            )
        except ZombiError as unheard:
            log.warning("the gateway could not be told about %s: %s", table, unheard)


def as_dagster_wants(error: ZombiError) -> Exception:
    """The exception that makes Dagster wait, retry or stop."""
    if error.code == LEASE_HELD:
        return dg.RetryRequested(LEASE_TRIES_MAX, LEASE_WAIT_SECS)
    if isinstance(error, TransientError):
        return error
    text = f"{error.code}: {error}"
    return dg.Failure(text, metadata={"code": error.code}, allow_retries=False)


def run_url(dagster_port: int, run_id: str) -> str:
    return f"http://127.0.0.1:{dagster_port}/runs/{run_id}"
