"""Starts runs from a warm process, and knows whether their workers live.

Dagster's own launcher imports everything anew for each run, which costs more CPU than a
flush does, and takes a run whose worker died with the code server for alive until
`max_runtime_seconds`. Here each run is forked off a process that has the definitions loaded,
and its worker is known by process id and start time, which the run's tags keep. Works on
one machine only: the daemon starts the workers, the webserver may stop them. Changed code
runs when the daemon was started again, not when the UI reloads definitions.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import dagster as dg
from dagster._core.launcher.base import (
    CheckRunHealthResult,
    LaunchRunContext,
    RunLauncher,
    WorkerStatus,
)
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import ConfigurableClass, ConfigurableClassData

WORKER_TAG: Final = ".zombi/worker"
"""Process id and start time, as `/proc` has them; hidden in the UI by its leading dot."""

PRELOADED: Final = ["dagster._cli", "zombi_platform.definitions"]


class WarmRunLauncher(RunLauncher[dg.DagsterInstance], ConfigurableClass):
    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        self._inst_data = inst_data
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(PRELOADED)
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        return cls(inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        origin = context.job_code_origin
        assert origin is not None, "only runs of a code location are launched"
        run_id = context.dagster_run.run_id
        call = ExecuteRunArgs(origin, run_id, self._instance.get_ref()).get_command_args()
        worker = self._processes.Process(target=_work, args=(call,), name=f"run {run_id}")
        worker.start()
        assert worker.pid is not None
        self._instance.add_run_tags(run_id, {WORKER_TAG: _mark(worker.pid)})

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        if not _lives(run):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(run), signal.SIGINT)
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        if _lives(run):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(
            WorkerStatus.NOT_FOUND, f"process {run.tags.get(WORKER_TAG, '')} has ended"
        )


def _work(call: Sequence[str]) -> None:
    """What `dagster api execute_run …` does, in this process."""
    from dagster._cli import cli

    cli(args=list(call[call.index("api") :]), standalone_mode=False)


def _mark(pid: int) -> str:
    """The process and when it started, so that a reused number is not taken for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}@gone"
    fields = stat.rpartition(b")")[2].split()
    state, started = fields[0].decode(), fields[19].decode()
    return f"{pid}@{'gone' if state in 'ZX' else started}"


def _lives(run: dg.DagsterRun) -> bool:
    mark = run.tags.get(WORKER_TAG)
    return mark is not None and not mark.endswith("gone") and _mark(_pid(run)) == mark


def _pid(run: dg.DagsterRun) -> int:
    return int(run.tags[WORKER_TAG].partition("@")[0])
