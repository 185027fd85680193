"""The pipeline's routes of a real gateway, through PipelineClient and a real lake."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest

from tests.gateway import Gateway, running
from tests.lake.worlds import rows
from tests.worker import Worker
from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import CutState, Range
from zombi_platform.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    GatewayUnreachableError,
    NotFoundError,
    TransientError,
)
from zombi_platform.gateway.tokens import create_token

Employ = Callable[..., Worker]


@pytest.fixture
def employ() -> Iterator[Employ]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Worker(*args, **options))


@pytest.fixture
def worker(tmp_path: Path, employ: Employ) -> Iterator[Worker]:
    with running(tmp_path, lease_secs="600") as gateway:
        yield employ(gateway, tmp_path)


def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_events_go_to_the_lake_once_and_leave_the_hot_buffer(worker: Worker) -> None:
    worker.write(10)
    worker.lease()
    cut = worker.open_cut()
    assert worker.client.open_cut("orders", worker.epoch) == cut
    worker.stage(cut)
    [staged] = worker.client.cuts("orders")
    assert staged.state is CutState.STAGED and staged.missing == ()
    with pytest.raises(ConflictError) as refused:
        worker.client.report_commit("orders", worker.epoch, [cut.id])
    assert refused.value.code == "TABLE_DROPPED"
    worker.lake.commit("orders", [staged], before_write=worker.announce)
    answers = [worker.client.report_commit("orders", worker.epoch, [cut.id]) for _ in range(2)]
    assert answers[0] == answers[1]
    state = worker.lake.require_state("orders")
    assert answers[0].snapshot_id == state.snapshot_id
    assert answers[0].watermarks == dict(state.watermarks) == {0: 5, 1: 5}
    # What is repeated after the commit is answered as before, and nothing is taken back.
    report = worker.client.report_split("orders", worker.epoch, cut.id, 0, staged.files)
    assert report.kept
    assert worker.client.clean("orders", worker.epoch).deleted_events == 10
    again = worker.client.clean("orders", worker.epoch)
    assert (again.deleted_events, again.remaining_events, again.wait_secs) == (0, 0, 0.0)
    assert worker.client.open_cut("orders", worker.epoch) is None
    assert worker.client.cuts("orders") == []
    assert rows(worker.lake) == [(p, n) for p in (0, 1) for n in range(1, 6)]
    [table] = worker.client.tables()
    assert (table.events, table.unflushed_events, table.lag_secs) == (0, 0, 0.0)
    assert table.lake is not None and table.lake.snapshot_id == state.snapshot_id


def test_a_change_without_an_epoch_is_told_to_take_a_lease(worker: Worker) -> None:
    worker.write()
    for method, path in [
        ("POST", "cuts"),
        ("POST", "clean"),
        ("POST", "commit"),
        ("DELETE", "lease"),
        ("POST", "tombstones"),
        ("DELETE", "tombstones"),
        ("PUT", "cuts/1/splits/0"),
        ("POST", "cuts/1/splits/0/intent"),
    ]:
        url = f"{worker.gateway.url}/pipeline/tables/orders/{path}"
        answer = httpx.request(method, url, json={"paths": [], "files": [], "cuts": [1]})
        assert answer.status_code == 400, path
        assert "X-Zombi-Epoch" in answer.json()["error"]
        answer = httpx.request(method, url, headers={"X-Zombi-Epoch": "0x"}, json={})
        assert answer.status_code == 400, path


def test_a_worker_that_was_replaced_is_refused_at_every_step(
    worker: Worker, employ: Employ
) -> None:
    worker.write()
    worker.lease()
    cut = worker.open_cut()
    files = worker.write_files(cut, cut.splits[0])
    worker.client.release(worker.client.lease("orders", worker.name, worker.epoch))
    other = employ(worker.gateway, worker.data_dir)
    assert other.lease() == worker.epoch + 1
    with pytest.raises(ConflictError, match=f"leased to {other.name}"):
        employ(worker.gateway, worker.data_dir).lease()
    client, stale = worker.client, worker.epoch
    for call in (
        lambda: client.lease("orders", worker.name, stale),
        lambda: client.open_cut("orders", stale),
        lambda: client.intend("orders", stale, cut.id, 0, ["x"]),
        lambda: client.report_split("orders", stale, cut.id, 0, files),
        lambda: client.report_commit("orders", stale, [cut.id]),
        lambda: client.clean("orders", stale),
        lambda: client.add_tombstones("orders", stale, ["x"]),
        lambda: client.drop_tombstones("orders", stale, ["x"]),
    ):
        with pytest.raises(FencedError):
            call()
    other.flush()
    assert len(rows(worker.lake)) == 10


FAILPOINTS = [
    "cut.recorded=kill",
    "split.recorded=kill",
    "split.recorded=kill:2",
    "commit.verified=kill",
    "commit.recorded=kill",
    "clean.verified=kill",
    "clean.deleted=kill",
]


def test_a_gateway_killed_between_any_two_steps_goes_on_where_it_was(
    tmp_path: Path, employ: Employ
) -> None:
    limits = {"flush_max_segment": "3", "lease_secs": "600"}
    acked = 0
    for failpoint in FAILPOINTS:
        with running(tmp_path, failpoints=failpoint, **limits) as gateway:
            worker = employ(gateway, tmp_path, name="the one")
            # A commit that is found at the start may kill it before it takes a write.
            with pytest.raises((GatewayUnreachableError, httpx.TransportError)):
                worker.write(8)
                acked += 4
                worker.flush()
            gateway.kill()
    with running(tmp_path, **limits) as gateway:
        worker = employ(gateway, tmp_path, name="the one")
        worker.flush()
        [table] = worker.client.tables()
        assert (table.events, table.cuts) == (0, ())
        last = table.watermarks[0].high
        assert last >= acked >= 4 * (len(FAILPOINTS) - 1)
        assert rows(worker.lake) == [(p, n) for p in (0, 1) for n in range(1, last + 1)]


def test_a_commit_whose_report_was_lost_is_found_at_the_next_start(
    tmp_path: Path, employ: Employ
) -> None:
    with running(tmp_path) as gateway:
        worker = employ(gateway, tmp_path)
        worker.write(10)
        worker.lease()
        worker.stage(worker.open_cut())
        worker.lake.commit("orders", worker.client.cuts("orders"), before_write=worker.announce)
        gateway.kill()
    with running(tmp_path) as gateway:
        client = employ(gateway, tmp_path).client
        until(lambda: [cut.state for cut in client.cuts("orders")] == [CutState.COMMITTED])
        assert {m.flushed for m in client.tables()[0].watermarks.values()} == {5}


def test_a_lost_data_directory_continues_above_the_lake(tmp_path: Path, employ: Employ) -> None:
    lake = {"warehouse": str(tmp_path / "lake")}
    with running(tmp_path / "data", **lake) as gateway:
        worker = employ(gateway, tmp_path / "data", warehouse=lake["warehouse"])
        worker.write(10)
        worker.flush()
        gateway.kill()
    shutil.rmtree(tmp_path / "data")
    with running(tmp_path / "data", **lake) as gateway:
        worker = employ(gateway, tmp_path / "data", warehouse=lake["warehouse"])
        worker.write(4)
        marks = httpx.get(f"{gateway.url}/tables/orders/watermark").json()
        assert marks["partitions"]["0"]["high_watermark"] == 7
        assert marks["lake"]["watermarks"] == {"0": 5, "1": 5}
        worker.lease()
        cut = worker.open_cut()
        assert (cut.id, cut.ranges) == (2, (Range(0, 6, 7), Range(1, 6, 7)))
        worker.flush()
        assert rows(worker.lake) == [(p, n) for p in (0, 1) for n in range(1, 8)]


def test_an_older_data_directory_takes_no_write_to_a_table_the_lake_is_ahead_of(
    tmp_path: Path,
    employ: Employ,
) -> None:
    lake = {"warehouse": str(tmp_path / "lake")}
    with running(tmp_path / "data", **lake) as gateway:
        worker = employ(gateway, tmp_path / "data", warehouse=lake["warehouse"])
        worker.write(10)
        gateway.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "backup")
    with running(tmp_path / "data", **lake) as gateway:
        worker = employ(gateway, tmp_path / "data", warehouse=lake["warehouse"])
        worker.write(10)
        worker.flush()
    with running(tmp_path / "backup", **lake) as gateway:
        url = f"{gateway.url}/tables"
        answer = httpx.post(f"{url}/orders", json={"payload": "x"})
        assert (answer.status_code, answer.json()["code"]) == (503, "LAKE_AHEAD")
        assert httpx.post(f"{url}/other", json={"payload": "x"}).status_code == 202
        assert httpx.get(f"{url}/orders?limit=100").json()["count"] == 10


UNREACHABLE = {
    "catalog": "rest",
    "catalog_uri": "http://127.0.0.1:9",
}


def test_without_the_lake_a_new_directory_takes_no_write_and_a_known_one_goes_on(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "new", **UNREACHABLE) as gateway:
        answer = httpx.post(f"{gateway.url}/tables/t", json={"payload": "x"}, timeout=60)
        assert (answer.status_code, answer.json()["code"]) == (503, "LAKE_UNAVAILABLE")
        assert "ZOMBI_CATALOG" in answer.json()["error"] and answer.headers["retry-after"]
        ready = httpx.get(f"{gateway.url}/health/ready")
        assert ready.status_code == 503
        assert ready.json()["cold_storage"]["status"] == "error"
    with running(tmp_path / "known") as gateway:
        httpx.post(f"{gateway.url}/tables/t", json={"payload": "x"}).raise_for_status()
    with running(tmp_path / "known", **UNREACHABLE) as gateway:
        answer = httpx.post(f"{gateway.url}/tables/t", json={"payload": "y"}, timeout=60)
        assert (answer.status_code, answer.json()["offset"]) == (202, 2)
        answer = httpx.post(f"{gateway.url}/tables/fresh", json={"payload": "x"}, timeout=60)
        assert answer.json()["code"] == "LAKE_UNAVAILABLE"
        assert httpx.get(f"{gateway.url}/health/ready").status_code == 200


def test_a_flush_request_is_durable_and_answers_when_everything_is_committed(
    tmp_path: Path,
    employ: Employ,
) -> None:
    settings = {"pipeline_silence_secs": "1"}
    with running(tmp_path, **settings) as gateway:
        worker = employ(gateway, tmp_path)
        with pytest.raises(NotFoundError):
            worker.client.request_flush("orders", 0)
        worker.write(10)
        worker.lease()
        waiting = worker.client.request_flush("orders", 0.05)
        assert (waiting.status, waiting.events_flushed) == ("in_progress", 0)
        until(lambda: _silent(worker.client))
        gateway.kill()
    with running(tmp_path) as gateway:
        worker = employ(gateway, tmp_path, name=worker.name)
        [table] = worker.client.tables()
        assert table.requested and table.cut_due and "a flush was requested" in table.reasons
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(worker.client.request_flush("orders", 60))
        )
        asking.start()
        until(lambda: worker.client.tables()[0].requested)
        worker.flush()
        asking.join()
        [answer] = answers
        assert (answer.status, answer.snapshot_id) == (
            "flushed",
            worker.lake.require_state("orders").snapshot_id,
        )
        again = worker.client.request_flush("orders", 0)
        assert (again.status, again.events_flushed) == ("flushed", 0)
        assert not worker.client.tables()[0].requested
        worker.write(10)
        left = threading.Thread(
            target=lambda: answers.append(worker.client.request_flush("orders", 600))
        )
        left.start()
        until(lambda: worker.client.tables()[0].requested)
        assert gateway.stop() == 0
        left.join()
        assert answers[-1].status == "in_progress"


def _silent(client: PipelineClient) -> bool:
    try:
        client.request_flush("orders", 0)
    except TransientError as error:
        return error.code == "NO_PIPELINE"
    return False


def test_failures_and_registrations_are_shown_until_the_next_commit(worker: Worker) -> None:
    worker.write()
    worker.client.report_failure("orders", "boom", "E", "stage", transient=True, run_id="r1")
    worker.client.report_registration("orders", None, "catalog down")
    [table] = worker.client.tables()
    assert table.failure is not None and (table.failure.code, table.failure.run_id) == ("E", "r1")
    assert table.registration is not None and table.registration.lag
    marks = httpx.get(f"{worker.gateway.url}/tables/orders/watermark").json()
    assert marks["failure"]["error"] == "boom" and marks["lake"] is None
    assert httpx.get(f"{worker.gateway.url}/tables/orders/metadata").status_code == 404
    worker.flush()
    state = worker.lake.require_state("orders")
    worker.client.report_registration("orders", state.snapshot_id)
    [table] = worker.client.tables()
    assert table.failure is None
    assert table.registration is not None and not table.registration.lag
    found = httpx.get(f"{worker.gateway.url}/tables/orders/metadata").json()
    assert found["metadata_location"] == state.metadata_location
    assert found["watermarks"] == {"0": 5, "1": 5}


def test_numbers_past_all_bounds_are_refused_and_stop_nobody(worker: Worker) -> None:
    worker.write()
    worker.lease()
    cut = worker.open_cut()
    files = [asdict(file) for file in worker.write_files(cut, cut.splits[0])]
    split = f"/cuts/{cut.id}/splits/{cut.splits[0].number}"
    named = ("hour", "bytes", "events", "partition", "split", "first", "last")
    bodies = [("PUT", split, {"files": [{**files[0], name: 2**80}, *files[1:]]}) for name in named]
    bodies += [("PUT", split, {"files": [{**files[0], "hour": 2**40}, *files[1:]]})]
    bodies += [("POST", "/registration", {"snapshot_id": number}) for number in (2**80, -(2**80))]
    for method, path, body in bodies:
        answer = httpx.request(
            method,
            f"{worker.gateway.url}/pipeline/tables/orders{path}",
            json=body,
            headers={"X-Zombi-Epoch": str(worker.epoch)},
        )
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST"), body
    worker.write()


def test_a_worker_may_work_on_its_own_tables_only(tmp_path: Path, employ: Employ) -> None:
    file = tmp_path / "tokens.json"
    token = create_token(file, "w", ["pipeline"], ["orders"])
    admin = create_token(file, "a", ["admin"])
    reader = create_token(file, "r", ["read"])
    with running(tmp_path / "data", tokens_file=str(file)) as gateway:
        for name in ("orders", "other"):
            url = f"{gateway.url}/tables/{name}"
            header = {"Authorization": f"Bearer {admin}"}
            httpx.post(url, json={"payload": "x"}, headers=header).raise_for_status()
        client = employ(gateway, tmp_path, token=token).client
        assert [table.table for table in client.tables()] == ["orders"]
        epoch = client.lease("orders", "me").epoch
        assert client.open_cut("orders", epoch) is not None
        for refused in (client.cuts, lambda t: client.lease(t, "me")):
            with pytest.raises(ForbiddenError):
                refused("other")
        with pytest.raises(ForbiddenError):
            employ(gateway, tmp_path, token=reader).client.tables()


def test_thresholds_of_single_tables_follow_their_file(tmp_path: Path, employ: Employ) -> None:
    file = tmp_path / "tables.toml"
    file.write_text("[orders]\nflush_interval_secs = 100000\n")
    with running(tmp_path / "data", tables_file=str(file), flush_interval_secs="1") as gateway:
        worker = employ(gateway, tmp_path / "data")
        worker.write()
        employ(gateway, tmp_path / "data", table="other").write()

        def due() -> dict[str, bool]:
            return {table.table: table.cut_due for table in worker.client.tables()}

        until(lambda: due() == {"orders": False, "other": True})
        file.write_text("[orders]\nflush_interval_secs = 'soon'\n")
        file.write_text("[orders]\ntarget_file_size_mb = 1\n")
        until(lambda: due() == {"orders": True, "other": True})
    file.write_text("[orders]\nflush_intervall_secs = 1\n")
    with pytest.raises(AssertionError, match="did not start"):
        Gateway(tmp_path / "data", tables_file=str(file))
