"""What only Spark can suffer: a server that is down or restarted, tasks that are repeated,
executors that lack this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.staging import TABLE, Staging, stage
from tests.gateway import running
from tests.platform import wait_until
from tests.spark import ForeignServer, SparkServer, free_port, is_open
from zombi_platform.cuts import CutState
from zombi_platform.engines.spark.engine import SparkEngine
from zombi_platform.engines.spark.session import Connection
from zombi_platform.errors import EngineUnavailableError, SettingsError
from zombi_platform.hot.store import Store
from zombi_platform.hot.tombstones import count_due
from zombi_platform.settings import Settings

# Two starts of Spark in one test take a while on a busy machine.
pytestmark = pytest.mark.timeout(400)


def test_a_server_that_is_down_is_named_with_what_to_do() -> None:
    engine = SparkEngine(Connection(f"sc://127.0.0.1:{free_port()}", ship_code=False))
    with pytest.raises(EngineUnavailableError, match="zombi spark"):
        engine.ready()


@pytest.mark.parametrize("remote", ["127.0.0.1:15002", "http://host:15002", "sc://:1", "sc://h:x"])
def test_an_address_that_cannot_work_is_refused(remote: str) -> None:
    with pytest.raises(SettingsError, match="ZOMBI_SPARK_REMOTE"):
        Connection(remote, ship_code=True)


@pytest.mark.integration
def test_repeated_tasks_leave_no_file_that_nobody_knows_of(tmp_path: Path) -> None:
    # Every third split that a Python worker has written kills it before the report.
    server = SparkServer(spark_master="local[1,3]", failpoints="stage.written=kill:3")
    engine = SparkEngine(Connection(server.remote, ship_code=False))
    try:
        with (
            running(tmp_path / "data", flush_max_segment="500") as gateway,
            Staging(gateway, tmp_path / "lake") as staging,
        ):
            staging.send_mixed()
            cut, job = staging.open()
            told = stage(engine, job, cut.splits)
            assert len(told) == len(cut.splits)
            staged = staging.cut()
            assert staged.state is CutState.STAGED
            rows = [row for file in staged.files for row in staging.rows(file)]
            assert sorted(rows) == sorted(staging.acked)
            recorded = {file.path for file in staged.files}
            strays = staging.files_on_disk() - recorded
    finally:
        engine.close()
        server.stop()
    assert strays
    store = Store(Settings(data_dir=tmp_path / "data"))
    assert count_due(store, TABLE, now_ms=2**62) == len(strays)
    store.close()


@pytest.mark.integration
def test_a_server_that_came_back_is_used_again(staging: Staging) -> None:
    server = SparkServer(spark_master="local[1,3]")
    engine = SparkEngine(Connection(server.remote, ship_code=False))
    staging.send(0, [0] * 600)
    cut, job = staging.open()
    stage(engine, job, cut.splits[:1])
    # Killed, not stopped: Spark must end with the command that started it all the same.
    server.kill()
    wait_until(lambda: not is_open(server.port), "the orphaned server has ended")
    with pytest.raises(EngineUnavailableError):
        engine.ready()
    again = SparkServer(port=server.port, spark_master="local[1,3]")
    try:
        stage(engine, job, cut.splits[1:])
        assert staging.cut().state is CutState.STAGED
    finally:
        engine.close()
        assert again.stop() == 0
    assert not is_open(again.port)


@pytest.mark.integration
def test_executors_need_not_have_this_package(staging: Staging, tmp_path: Path) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    server = ForeignServer(tmp_path)
    try:
        plain = SparkEngine(Connection(server.remote, ship_code=False))
        with pytest.raises(EngineUnavailableError, match="zombi_platform"):
            stage(plain, job, cut.splits)
        for splits in (cut.splits[:2], cut.splits[2:]):
            # As two processes would, one after the other.
            engine = SparkEngine(Connection(server.remote, ship_code=True))
            assert all(result.kept for result in stage(engine, job, splits))
            engine.close()
    finally:
        server.stop()
    assert staging.cut().state is CutState.STAGED
