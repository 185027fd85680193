"""Catalogs behind HTTP: ours when answers get lost, and the external one that only follows."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.lake.staging import Tombstones, merge, stage
from tests.lake.worlds import put, rows
from tests.rest import RestServer
from tests.s3 import Fault, FaultyProxy, faulty, free_port
from zombi_platform.cuts import Range
from zombi_platform.errors import LakeConflictError, LakeUnavailableError, SettingsError, ZombiError
from zombi_platform.lake.catalogs import NESSIE
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.registration import ExternalCatalog, Registration
from zombi_platform.settings import Settings


@pytest.fixture
def proxy(rest_server: RestServer) -> Iterator[FaultyProxy]:
    with faulty(rest_server.url) as running:
        yield running


def through(proxy: FaultyProxy, data_dir: Path, **changes: object) -> Settings:
    given: dict[str, object] = {
        "data_dir": data_dir,
        "catalog": "rest",
        "catalog_uri": proxy.endpoint,
        "catalog_namespace": f"n{uuid.uuid4().hex[:8]}",
    }
    return Settings(**given | changes)  # type: ignore[arg-type]


def is_commit(method: str, path: str) -> bool:
    return method == "POST" and path.endswith("/tables/orders")


@pytest.mark.integration
@pytest.mark.parametrize("action", ["drop", "refuse", "500"])
def test_an_unknown_outcome_is_looked_up_and_never_repeated(
    proxy: FaultyProxy, tmp_path: Path, action: str
) -> None:
    lake = Lake(through(proxy, tmp_path))
    lake.ensure_table("orders")
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 5))
    proxy.inject(Fault(is_commit, action))
    if action == "drop":
        assert put(lake, cut) == 5
    else:
        with pytest.raises(LakeUnavailableError):
            put(lake, cut)
        assert put(lake, cut) == 5
    assert put(lake, cut) == 0
    assert rows(lake) == [(0, n) for n in range(1, 6)]


@pytest.mark.integration
def test_a_table_whose_making_was_not_answered_is_there(proxy: FaultyProxy, tmp_path: Path) -> None:
    lake = Lake(through(proxy, tmp_path))
    proxy.inject(Fault(lambda m, p: m == "POST" and p.endswith("/tables"), "drop"))
    assert lake.ensure_table("orders").watermarks == {}


@pytest.mark.integration
def test_a_catalog_that_hangs_is_given_up(proxy: FaultyProxy, tmp_path: Path) -> None:
    lake = Lake(through(proxy, tmp_path, s3_timeout_secs=0.5))
    lake.ensure_table("orders")
    proxy.inject(Fault(lambda *_: True, "hang", times=100))
    with pytest.raises(LakeUnavailableError, match=r"ZOMBI_S3_TIMEOUT_SECS") as raised:
        lake.state("orders")
    assert raised.value.code == "CATALOG_TIMEOUT"
    with pytest.raises(LakeUnavailableError):
        Lake(through(proxy, tmp_path, s3_timeout_secs=0.5)).tables()


def test_a_catalog_that_is_down_is_named(tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    lake = Lake(Settings(data_dir=tmp_path, catalog="rest", catalog_uri=address))
    with pytest.raises(LakeUnavailableError, match=address):
        lake.state("orders")
    assert any(address in problem for problem in lake.check())


@pytest.mark.integration
@pytest.mark.parametrize("kept", [5, 100])
def test_an_external_catalog_agrees_after_fifty_flushes_with_outages(
    proxy: FaultyProxy, tmp_path: Path, kept: int
) -> None:
    settings = through(
        proxy, tmp_path, catalog="filesystem", catalog_url=proxy.endpoint, snapshots_kept=kept
    )
    lake = Lake(settings)
    catalog = ExternalCatalog(settings, lake)
    chance = random.Random(kept)
    failures = 0
    for n in range(1, 51):
        put(lake, stage(lake.storage, "orders", n, Range(0, 2 * n - 1, 2 * n)))
        plan = lake.plan_merge("orders")
        if plan is not None:
            assert lake.replace(plan, merge(lake.storage, plan), before_write=Tombstones())
        if chance.random() < 0.4:
            fault = chance.choice(["refuse", "500", "drop"])
            proxy.inject(Fault(lambda *_: chance.random() < 0.5, fault, times=chance.randint(1, 6)))
        else:
            proxy.heal()
        try:
            catalog.bring_up_to_date("orders")
        except ZombiError:
            failures += 1
    assert failures > 0, "the outages did not happen"
    proxy.heal()
    state = lake.require_state("orders")
    shown_now = Registration(state.snapshot_id, 0, state.last_zombi_snapshot)
    assert catalog.bring_up_to_date("orders") == shown_now
    shown = catalog.catalog.load_table((lake.namespace, "orders"))
    assert {each.snapshot_id for each in shown.metadata.snapshots} == state.snapshot_ids
    assert len(list(shown.scan().plan_files())) < 20, "small files were merged"
    assert shown.properties["zombi.watermark.0"] == "100"
    assert shown.scan(selected_fields=("sequence",)).to_arrow().num_rows == 100


@pytest.mark.integration
def test_how_far_the_external_catalog_lags_is_told(proxy: FaultyProxy, tmp_path: Path) -> None:
    settings = through(proxy, tmp_path, catalog="filesystem", catalog_url=proxy.endpoint)
    lake = Lake(settings)
    catalog = ExternalCatalog(settings, lake)
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 2)))
    assert catalog.look("orders") == Registration(None, 1)
    first = catalog.bring_up_to_date("orders").snapshot_id
    for n in (2, 3):
        put(lake, stage(lake.storage, "orders", n, Range(0, 2 * n - 1, 2 * n)))
    assert catalog.look("orders") == Registration(first, 2, first)


@pytest.mark.integration
def test_another_table_of_the_same_name_is_left_alone(proxy: FaultyProxy, tmp_path: Path) -> None:
    settings = through(proxy, tmp_path, catalog="filesystem", catalog_url=proxy.endpoint)
    theirs = Lake(through(proxy, tmp_path / "theirs", catalog_namespace=settings.catalog_namespace))
    theirs.ensure_table("orders")
    lake = Lake(settings)
    lake.ensure_table("orders")
    with pytest.raises(LakeConflictError, match="another table 'orders'"):
        ExternalCatalog(settings, lake).bring_up_to_date("orders")


def test_nessie_is_refused_because_it_loses_commits(tmp_path: Path) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"defaults": {}, "overrides": {NESSIE: "true"}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody wants to know."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            lake = Lake(Settings(data_dir=tmp_path, catalog="rest", catalog_uri=address))
            with pytest.raises(SettingsError, match="Nessie"):
                lake.tables()
        finally:
            server.shutdown()


def test_threads_do_not_share_a_connection_to_a_metastore(tmp_path: Path) -> None:
    """Opening connects to nothing yet, so none is needed here."""
    settings = Settings(data_dir=tmp_path, catalog="hive", catalog_uri="thrift://127.0.0.1:1")
    lake = Lake(settings)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = [pool.submit(lambda: lake.catalog).result() for _ in range(2)]
    assert elsewhere[0] is elsewhere[1]
    assert lake.catalog is lake.catalog
    assert lake.catalog is not elsewhere[0]
