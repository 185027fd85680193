"""Disk and object store: what is durable, what is exclusive, and what failures say."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3 import Fault, FaultyProxy, ObjectServer, faulty, free_port
from zombi_platform.errors import LakeRefusedError, LakeUnavailableError, SettingsError
from zombi_platform.lake.storage import Storage
from zombi_platform.settings import Settings

S3_FAULTS = ["refuse", "500", "drop"]


@pytest.fixture
def proxy(moto: ObjectServer) -> Iterator[FaultyProxy]:
    with faulty(moto.endpoint) as running:
        yield running


@pytest.fixture(params=["disk", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "disk":
        return Storage(f"file://{tmp_path}/warehouse")
    request.getfixturevalue("credentials")
    server = request.getfixturevalue("moto")
    return Storage(f"s3://{server.bucket()}/tables", endpoint=server.endpoint)


def s3(endpoint: str, bucket: str, **options: float) -> Storage:
    patience = {"tries": 4, "backoff_initial_ms": 1, "timeout_secs": 10.0} | options
    return Storage(f"s3://{bucket}/tables", endpoint=endpoint, **patience)  # type: ignore[arg-type]


def test_a_file_is_created_once(storage: Storage) -> None:
    place = f"{storage.warehouse}/orders/metadata/v1.metadata.json"
    storage.create(place, b"mine")
    with pytest.raises(FileExistsError):
        storage.create(place, b"theirs")
    assert storage.read(place) == b"mine"
    storage.write(place, b"newer")
    assert storage.read(place) == b"newer"


def test_files_are_listed_by_prefix_and_deleted(storage: Storage) -> None:
    places = [f"{storage.warehouse}/orders/data/{name}" for name in ("a1", "a2", "b1", "ab/x")]
    for place in places:
        storage.create(place, b"12345")
    found = list(storage.files(f"{storage.warehouse}/orders/data/a"))
    assert sorted(each.location for each in found) == sorted(p for p in places if "/b1" not in p)
    assert {each.bytes for each in found} == {5}
    assert all(abs(each.modified_ms / 1000 - time.time()) < 3600 for each in found)
    assert sorted(storage.names(f"{storage.warehouse}/orders/data/a")) == ["a1", "a2"]
    assert storage.names(f"{storage.warehouse}/nowhere/v") == []
    assert storage.directories(storage.warehouse) == ["orders"]
    storage.delete([*places, f"{storage.warehouse}/never-there"])
    assert list(storage.files(f"{storage.warehouse}/")) == []
    assert not storage.exists(places[0])
    with pytest.raises(FileNotFoundError):
        storage.read(places[0])


def test_large_files_are_written_as_streams(storage: Storage) -> None:
    place = f"{storage.hour_directory('orders', 497_000, 7)}/x.parquet"
    assert place.endswith("/orders/data/event_date=2026-09-12/event_hour=08/partition=7/x.parquet")
    with storage.output(place) as sink:
        sink.write(b"x" * 100)
    assert storage.read(place) == b"x" * 100


def test_a_storage_travels_to_another_process(storage: Storage) -> None:
    storage.create(f"{storage.warehouse}/x", b"")
    assert pickle.loads(pickle.dumps(storage)) == storage


def test_nothing_temporary_is_left_on_disk(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}")
    storage.create(f"file://{tmp_path}/a", b"1")
    storage.write(f"file://{tmp_path}/b", b"2")
    with pytest.raises(FileExistsError):
        storage.create(f"file://{tmp_path}/a", b"3")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("action", S3_FAULTS)
def test_a_fault_now_and_then_is_not_noticed(
    proxy: FaultyProxy, moto: ObjectServer, credentials: None, action: str
) -> None:
    storage = s3(proxy.endpoint, moto.bucket())
    place = f"{storage.warehouse}/x"
    for method, act in (
        ("PUT", lambda: storage.create(place, b"mine")),
        ("GET", lambda: storage.read(place)),
        ("POST", lambda: storage.delete([place])),
    ):
        proxy.inject(Fault(lambda m, _, method=method: m == method, action, times=2))  # type: ignore[misc]
        act()
    assert not storage.exists(place)


def test_a_create_whose_every_answer_is_lost_was_still_ours(
    proxy: FaultyProxy, moto: ObjectServer, credentials: None
) -> None:
    storage = s3(proxy.endpoint, moto.bucket())
    proxy.inject(Fault(lambda method, _: method == "PUT", "drop", times=4))
    storage.create(f"{storage.warehouse}/x", b"mine")


def test_a_create_that_somebody_else_won_is_told_from_a_lost_answer(
    proxy: FaultyProxy, moto: ObjectServer, credentials: None
) -> None:
    storage = s3(proxy.endpoint, moto.bucket())
    place = f"{storage.warehouse}/x"
    storage.create(place, b"theirs")
    proxy.inject(Fault(lambda method, _: method == "PUT", "drop", times=1))
    with pytest.raises(FileExistsError):
        storage.create(place, b"mine")


@pytest.mark.parametrize(("action", "code"), [("500", "STORE_FAILED"), ("hang", "STORE_TIMEOUT")])
def test_a_store_that_stays_broken_is_given_up_in_bounded_time(
    proxy: FaultyProxy, moto: ObjectServer, credentials: None, action: str, code: str
) -> None:
    storage = s3(proxy.endpoint, moto.bucket(), timeout_secs=0.3, tries=2)
    proxy.inject(Fault(lambda *_: True, action, times=100))
    with pytest.raises(LakeUnavailableError) as raised:
        storage.read(f"{storage.warehouse}/x")
    assert raised.value.code == code
    assert len(proxy.requests) <= 2
    with pytest.raises(LakeUnavailableError), storage.output(f"{storage.warehouse}/y") as sink:
        sink.write(b"x")


def test_an_endpoint_that_nobody_serves_is_named(credentials: None) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(LakeUnavailableError, match=endpoint) as raised:
        s3(endpoint, "bucket").read("s3://bucket/tables/x")
    assert raised.value.code == "STORE_UNREACHABLE"


def test_a_missing_bucket_is_told_from_everything_else(
    moto: ObjectServer, credentials: None
) -> None:
    storage = s3(moto.endpoint, "no-such-bucket")
    with pytest.raises(LakeRefusedError, match="there is no bucket 'no-such-bucket'") as raised:
        storage.check(exclusive=True)
    assert raised.value.code == "BUCKET_MISSING"
    with pytest.raises(LakeRefusedError, match="no-such-bucket"):
        list(storage.files(f"{storage.warehouse}/"))
    with pytest.raises(LakeRefusedError) as raised, storage.output(f"{storage.warehouse}/x") as s:
        s.write(b"x")
    assert raised.value.code == "BUCKET_MISSING"


def test_a_store_that_ignores_conditions_is_found_out(
    proxy: FaultyProxy, moto: ObjectServer, credentials: None
) -> None:
    storage = s3(proxy.endpoint, moto.bucket())
    storage.check(exclusive=True)
    proxy.inject(Fault(lambda method, _: method == "PUT", "unconditional", times=100))
    with pytest.raises(LakeRefusedError, match="If-None-Match") as raised:
        storage.check(exclusive=True)
    assert raised.value.code == "STORE_UNSAFE"
    storage.check(exclusive=False)
    assert list(storage.files(f"{storage.warehouse}/")) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("variable", "names"),
    [("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"), ("AWS_SECRET_ACCESS_KEY", "AWS_SECRET")],
)
def test_wrong_credentials_say_which(
    versitygw: ObjectServer,
    credentials: None,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    names: str,
) -> None:
    bucket = versitygw.bucket()
    monkeypatch.setenv(variable, "wrong")
    storage = s3(versitygw.endpoint, bucket)
    with pytest.raises(LakeRefusedError, match=names) as raised:
        storage.check(exclusive=True)
    assert raised.value.code == "CREDENTIALS_WRONG"
    with pytest.raises(LakeRefusedError) as raised, storage.output(f"{storage.warehouse}/x") as s:
        s.write(b"x")
    assert raised.value.code == "CREDENTIALS_WRONG"


def test_missing_credentials_are_asked_for(
    moto: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(LakeRefusedError, match="set AWS_ACCESS_KEY_ID") as raised:
        s3(moto.endpoint, "anything").check(exclusive=True)
    assert raised.value.code == "CREDENTIALS_MISSING"


def test_a_full_disk_says_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    storage = Storage("file:///dev")
    writing = storage.output("file:///dev/full")
    with pytest.raises(LakeUnavailableError, match="no space left") as raised, writing as sink:
        sink.write(b"x" * 1_000_000)
    assert raised.value.code == "DISK_FULL"


@pytest.mark.parametrize(
    ("given", "location"),
    [
        ({"s3_bucket": "b"}, "s3://b/tables"),
        ({"s3_bucket": "b", "storage_path": ""}, "s3://b"),
        ({"warehouse": "s3://b/x/"}, "s3://b/x"),
        ({"warehouse": "/srv/lake"}, "file:///srv/lake"),
        ({"warehouse": "file:///srv/lake"}, "file:///srv/lake"),
        ({"data_dir": Path("/srv/data")}, "file:///srv/data/warehouse"),
    ],
)
def test_the_warehouse_follows_the_settings(given: dict[str, object], location: str) -> None:
    assert Storage.from_settings(Settings(**given)).warehouse == location  # type: ignore[arg-type]


@pytest.mark.parametrize("warehouse", ["gs://b/x", "s3:///x", "/srv/100%"])
def test_a_warehouse_that_cannot_work_is_refused(warehouse: str) -> None:
    with pytest.raises(SettingsError, match=r"ZOMBI_WAREHOUSE|warehouse path"):
        Storage.from_settings(Settings(warehouse=warehouse))
