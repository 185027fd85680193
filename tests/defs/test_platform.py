"""The whole platform as `make up` runs it, steered through Dagster's own API, and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.defs.flushing import hide, put_back
from tests.defs.oracle import Oracle, check, committed
from tests.defs.ui import Ui
from tests.gateway import ZOMBI
from tests.platform import Platform, up, wait_until
from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.defs.launcher import WORKER_TAG
from zombi_platform.errors import TransientError
from zombi_platform.progress import TableProgress
from zombi_platform.settings import Settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUICK = {
    "flush_interval_secs": "1",
    "snapshot_max_age_secs": "1",
    "lease_secs": "10",
    "delete_grace_secs": "5",
}


class Here:
    """A platform with its gateway's client, its UI and its settings."""

    def __init__(self, platform: Platform, **settings: str) -> None:
        self.platform = platform
        self.url = platform.services["gateway"]
        self.ui = Ui(platform.services["web"])
        self.gateway = PipelineClient(self.url)
        environ = {"ZOMBI_DATA_DIR": str(platform.home), "ZOMBI_URL": self.url}
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        self.settings = Settings.from_env(environ)

    def send(self, table: str, count: int = 100) -> Oracle:
        oracle = Oracle(self.url, table)
        with httpx.Client(base_url=self.url) as http:
            oracle.write(http, count)
        return oracle

    def progress(self, table: str) -> TableProgress:
        (found,) = (known for known in self.gateway.tables() if known.table == table)
        return found

    def settle(self, oracle: Oracle) -> None:
        """Wait until nothing of the table is hot any more, then hold it against the acks."""

        def settled() -> bool:
            try:
                known = {progress.table: progress for progress in self.gateway.tables()}
            except TransientError:
                return False
            return oracle.table not in known or known[oracle.table].events == 0

        wait_until(settled, f"{oracle.table} is in the lake")
        check(oracle, self.settings)

    def close(self) -> None:
        self.ui.close()
        self.gateway.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    home = tmp_path_factory.mktemp("platform") / "home"
    with up(home, "--engine=arrow", **QUICK) as platform:
        made = Here(platform)
        yield made
        made.close()
        assert platform.stop() == 0
        assert platform.processes() == {}


def test_events_reach_the_lake_without_a_hand(here: Here) -> None:
    here.settle(here.send("byitself", 1000))
    runs = [run for run in here.ui.runs() if ("zombi/due" in tag_names(run))]
    assert runs
    assert {here.ui.wait(run["runId"])["status"] for run in runs} == {"SUCCESS"}


def tag_names(run: dict[str, list[dict[str, str]]]) -> set[str]:
    return {tag["key"] for tag in run["tags"]}


def test_a_flush_is_triggered_and_watched_from_the_ui(here: Here) -> None:
    oracle = here.send("triggered")
    wait_until(lambda: here.ui.asset("hot_cut")["partitionStats"]["numPartitions"], "partitions")
    here.settle(oracle)
    run = here.ui.wait(here.ui.launch("flush", "triggered"))
    assert run["status"] == "SUCCESS"
    assert {step["stepKey"] for step in run["stepStats"]} == {
        *("hot_cut", "staged_files", "snapshot", "snapshot_rows_reconcile"),
        *("hot_cleanup", "merged_files"),
    }
    snapshot = here.ui.asset("snapshot")
    assert snapshot["partitionStats"]["numMaterialized"] >= 1
    (found,) = snapshot["assetChecksOrError"]["checks"]
    assert (found["name"], found["blocking"]) == ("rows_reconcile", True)
    assert found["executionForLatestMaterialization"]["evaluation"]["success"]


def test_a_run_waits_for_the_lease_of_another_worker_and_may_be_cancelled(here: Here) -> None:
    here.settle(here.send("waiting"))
    wait_until(lambda: not leases(here, "waiting"), "the flush has given its lease back")
    lease = here.gateway.lease("waiting", "somebody")
    run_id = here.ui.launch("flush", "waiting")

    def waits() -> bool:
        here.gateway.renew(lease)
        steps = here.ui.run(run_id)["stepStats"]
        return any(step["status"] == "UP_FOR_RETRY" or step["attempts"] for step in steps)

    wait_until(waits, "the run has met the lease", every_secs=1)
    here.ui.terminate(run_id)
    assert here.ui.wait(run_id)["status"] == "CANCELED"
    here.gateway.release(lease)
    here.settle(here.send("waiting"))


def test_a_failed_run_is_executed_again_from_its_failed_step(here: Here) -> None:
    here.settle(here.send("mended"))
    table = here.platform.home / "warehouse" / "mended"
    away = hide(table)
    oracle = here.send("mended")
    wait_until(lambda: here.progress("mended").failure is not None, "the fault is shown")
    failure = here.progress("mended").failure
    assert failure is not None
    assert (failure.code, failure.transient) == ("TABLE_DROPPED", False)
    status = httpx.get(f"{here.url}/tables/mended/watermark").json()
    assert status["failure"]["code"] == "TABLE_DROPPED"
    assert failure.run_id is not None
    failed = here.ui.wait(failure.run_id)
    assert failed["status"] == "FAILURE"
    others = here.send("sound")
    here.settle(others)
    put_back(table, away)
    again = here.ui.wait(here.ui.re_execute(failure.run_id))
    assert again["status"] == "SUCCESS"
    steps = {step["stepKey"] for step in failed["stepStats"] if step["status"] == "FAILURE"}
    assert steps <= {step["stepKey"] for step in again["stepStats"]}
    assert "hot_cut" not in {step["stepKey"] for step in again["stepStats"]}
    here.settle(oracle)


def test_a_day_of_hours_is_backfilled_in_one_run(here: Here) -> None:
    here.settle(here.send("backfilled", 240))
    midnight = datetime.now(UTC).replace(hour=0, minute=0) - timedelta(days=1)
    hours = [midnight + timedelta(hours=number) for number in range(24)]
    keys = [f"{hour:%Y-%m-%d-%H:00}|backfilled" for hour in hours]
    backfill = here.ui.backfill("events", keys)
    wait_until(
        lambda: here.ui.backfill_status(backfill) == "COMPLETED_SUCCESS", "backfill", every_secs=1
    )
    runs = here.ui.runs(tags=[{"key": "dagster/backfill", "value": backfill}])
    assert len(runs) == 1
    stats = here.ui.asset("events")["partitionStats"]
    assert stats["numMaterialized"] >= 24
    assert stats["numFailed"] == 0


def test_many_due_tables_share_few_runs(here: Here) -> None:
    before = len(here.ui.runs())
    oracles = [here.send(f"many{number}") for number in range(10)]
    for oracle in oracles:
        here.settle(oracle)
    assert len(here.ui.runs()) - before <= 4


PROGRAMS = {
    "gateway": "zombi gateway",
    "code": "dagster api grpc",
    "web": "dagster-webserver",
    "daemon": "dagster-daemon run",
}


def test_each_part_is_killed_during_a_flush_and_the_platform_heals(here: Here) -> None:
    oracle = Oracle(here.url, "killed").start()
    epoch = 0
    try:
        for victim in ("run worker", *PROGRAMS):
            # A new lease shows that the platform has recovered from the kill before.
            epoch = wait_for_flush(here, oracle, epoch)
            os.kill(find(here, victim), signal.SIGKILL)
        wait_for_flush(here, oracle, epoch)
    finally:
        oracle.stop()
    here.settle(oracle)


def wait_for_flush(here: Here, oracle: Oracle, epoch: int) -> int:
    """Wait until the table has a lease past `epoch`; that lease's epoch."""
    found = 0

    def flushing() -> bool:
        nonlocal found
        found = max(leases(here, oracle.table), default=0)
        return found > epoch

    wait_until(flushing, f"a flush of {oracle.table} after epoch {epoch}")
    return found


def leases(here: Here, table: str) -> list[int]:
    try:
        tables = here.gateway.tables()
    except TransientError:
        return []
    return [known.lease.epoch for known in tables if known.table == table and known.lease]


def find(here: Here, victim: str) -> int:
    if victim != "run worker":
        return here.platform.pid(PROGRAMS[victim])
    running: list[dict[str, Any]] = []

    def started() -> bool:
        running[:] = here.ui.runs(statuses=["STARTED"])
        return bool(running)

    wait_until(started, "a run")
    marks = {tag["key"]: tag["value"] for tag in running[0]["tags"]}
    return int(marks[WORKER_TAG].partition("@")[0])


def test_a_flush_by_hand_during_a_run_doubles_nothing(here: Here) -> None:
    oracle = Oracle(here.url, "byhand").start()
    epoch = 0
    environ = {**os.environ, "ZOMBI_URL": here.url, "ZOMBI_DATA_DIR": str(here.platform.home)}
    try:
        for _ in range(3):
            epoch = wait_for_flush(here, oracle, epoch)
            subprocess.run([ZOMBI, "flush", "byhand"], env={**environ, "ZOMBI_ENGINE": "arrow"})
    finally:
        oracle.stop()
    here.settle(oracle)


def test_what_came_without_dagster_is_flushed_when_it_returns(tmp_path: Path) -> None:
    home = tmp_path / "home"
    quick = {**QUICK, "pipeline_silence_secs": "1"}
    with up(home, "--no-dagster", "--engine=arrow", **quick) as alone:
        url = alone.services["gateway"]
        oracle = Oracle(url, "alone")
        with httpx.Client(base_url=url) as http:
            oracle.write(http)
            wait_until(lambda: pipeline_status(http) == "warning", "the gateway misses a pipeline")
            oracle.write(http)
    with up(home, "--engine=arrow", **quick) as platform:
        here = Here(platform)
        here.settle(oracle)
        assert len(oracle.acked) == 1000
        with httpx.Client(base_url=here.url) as http:
            assert pipeline_status(http) == "ok"
        here.close()


def pipeline_status(http: httpx.Client) -> str:
    answer = http.get("/health/ready")
    assert answer.status_code == 200
    return str(answer.json()["pipeline"]["status"])


def test_two_platforms_on_one_lake_double_nothing(tmp_path: Path) -> None:
    shared = {**QUICK, "warehouse": str(tmp_path / "lake")}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [up(tmp_path / name, "--engine=arrow", **shared) for name in ("one", "two")]
        first, second = pool.map(stack.enter_context, starting)
        one, two = Here(first, **shared), Here(second, **shared)
        mine = one.send("shared", 500)
        one.settle(mine)
        theirs = two.send("shared", 500)
        both = one.send("shared", 500)
        wait_until(
            lambda: one.progress("shared").failure or two.progress("shared").failure,
            "one of them is refused",
        )
        rows = committed(one.settings, "shared")
        assert set(rows.values()) == {1}
        assert len({(p, s) for p, s, _ in rows}) == len(rows)
        acked = [*mine.acked.items(), *theirs.acked.items(), *both.acked.items()]
        known = {(p, s): payload for p, s, payload in rows}
        assert all(known.get(place) == payload for place, payload in mine.acked.items())
        assert {payload for _, _, payload in rows} <= {payload for _, payload in acked}
        one.close()
        two.close()


def test_a_killed_spark_server_comes_back_and_so_do_flushes(tmp_path: Path) -> None:
    with up(tmp_path / "home", "--engine=spark", spark_port=str(free_port()), **QUICK) as platform:
        here = Here(platform)
        oracle = Oracle(here.url, "sparked").start()
        try:
            epoch = wait_for_flush(here, oracle, 0)
            os.kill(platform.pid("SparkConnectServer"), signal.SIGKILL)
            wait_for_flush(here, oracle, epoch)
        finally:
            oracle.stop()
        here.settle(oracle)
        materialized = here.ui.asset("staged_files")["partitionStats"]["numMaterialized"]
        assert materialized == 1
        here.close()
        assert platform.stop() == 0
        wait_until(lambda: not platform.processes(), "the JVM has gone too")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
