"""The catalog that is only files: hints, versions, and answers that got lost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.update import SetPropertiesUpdate

from tests.lake.staging import stage
from tests.lake.worlds import World, make_world, put, rows
from tests.s3 import Fault, FaultyProxy, Match, faulty
from zombi_platform.cuts import Range
from zombi_platform.lake.filesystem_catalog import PRUNED_EVERY, FilesystemCatalog
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.schema import METADATA_KEPT
from zombi_platform.lake.storage import Storage
from zombi_platform.settings import Settings


@pytest.fixture(params=["filesystem-disk", "filesystem-moto"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return make_world(request.param, request, tmp_path)


@pytest.fixture(
    params=["moto", pytest.param("versitygw", marks=pytest.mark.integration)],
)
def proxy(request: pytest.FixtureRequest) -> Iterator[tuple[FaultyProxy, Settings]]:
    """A store behind a proxy, and the settings of a lake in it."""
    request.getfixturevalue("credentials")
    server = request.getfixturevalue(request.param)
    with faulty(server.endpoint) as running:
        yield (
            running,
            Settings(
                s3_bucket=server.bucket(),
                s3_endpoint=running.endpoint,
                s3_retry_initial_ms=1,
                s3_timeout_secs=10,
            ),
        )


def hint(lake: Lake) -> str:
    return f"{lake.storage.table_location('orders')}/metadata/version-hint.text"


def version(lake: Lake) -> int:
    name = lake.require_state("orders").metadata_location.rsplit("/", 1)[1]
    return int(name.removeprefix("v").removesuffix(".metadata.json"))


def change(lake: Lake, table: Table, **properties: str) -> None:
    lake.catalog.commit_table(table, (), (SetPropertiesUpdate(updates=properties),))


def load(lake: Lake) -> Table:
    return lake.catalog.load_table((lake.namespace, "orders"))


@pytest.mark.parametrize("content", [None, b"1", b"999", b"not a number", b""])
def test_the_hint_is_only_a_hint(world: World, content: bytes | None) -> None:
    lake = world.worker()
    for n in (1, 2):
        put(lake, stage(lake.storage, "orders", n, Range(0, 2 * n - 1, 2 * n)))
    assert lake.storage.read(hint(lake)) == b"3"
    if content is None:
        lake.storage.delete([hint(lake)])
    else:
        lake.storage.write(hint(lake), content)
    fresh = world.worker()
    assert version(fresh) == 3
    put(fresh, stage(fresh.storage, "orders", 3, Range(0, 5, 6)))
    assert lake.storage.read(hint(lake)) == b"4"
    assert len(rows(lake)) == 6


def test_a_writer_that_slept_past_the_tidying_up_does_not_commit(world: World) -> None:
    lake = world.worker()
    lake.ensure_table("orders")
    asleep = load(lake)
    for n in range(4):
        change(lake, load(lake), round=str(n))
    second = asleep.metadata_location.replace("v1.", "v2.")
    lake.storage.delete([asleep.metadata_location, second])
    # The sleeper's own load would see the head, so make it see what it had in hand.
    sleeper = Sleeper(lake.storage, lake.namespace, asleep)
    with pytest.raises(CommitFailedException, match="long past"):
        sleeper.commit_table(asleep, (), (SetPropertiesUpdate(updates={"late": "yes"}),))
    assert not lake.storage.exists(second)
    assert version(lake) == 5
    assert "late" not in load(lake).properties


class Sleeper(FilesystemCatalog):
    """A writer whose load came long before its create."""

    def __init__(self, storage: Storage, namespace: str, loaded: Table) -> None:
        super().__init__(storage, namespace, grace_secs=3600)
        self._loaded = loaded

    def load_table(self, identifier: object) -> Table:
        return self._loaded


def test_only_metadata_that_is_old_and_unnamed_is_tidied_up(tmp_path: Path) -> None:
    lake = Lake(Settings(data_dir=tmp_path, delete_grace_secs=3600))
    lake.ensure_table("orders")
    extra = PRUNED_EVERY - 1
    for n in range(METADATA_KEPT + extra - 1):
        change(lake, load(lake), round=str(n))
    metadata = tmp_path / "warehouse/orders/metadata"

    def numbers() -> list[int]:
        return sorted(int(p.name[1:].partition(".")[0]) for p in metadata.glob("v*.metadata.json"))

    assert len(numbers()) == METADATA_KEPT + extra, "all of them are young"
    past = time.time() - 7200
    for number in numbers()[:5]:
        os.utime(metadata / f"v{number}.metadata.json", (past, past))
    change(lake, load(lake), round="last")
    assert numbers() == list(range(6, METADATA_KEPT + extra + 2))
    named = json.loads(lake.storage.read(load(lake).metadata_location))["metadata-log"]
    assert all(lake.storage.exists(entry["metadata-file"]) for entry in named)


def test_metadata_is_tidied_up_without_gaps(tmp_path: Path) -> None:
    """A reader that remembers a version takes it for the newest if the next one is not there."""
    lake = Lake(Settings(data_dir=tmp_path, delete_grace_secs=3600))
    lake.ensure_table("orders")
    for n in range(METADATA_KEPT + PRUNED_EVERY - 2):
        change(lake, load(lake), round=str(n))
    metadata = tmp_path / "warehouse/orders/metadata"
    past = time.time() - 7200
    for number in (1, 2, 4, 5):
        os.utime(metadata / f"v{number}.metadata.json", (past, past))
    change(lake, load(lake), round="last")
    left = [number for number in range(1, 6) if (metadata / f"v{number}.metadata.json").exists()]
    assert left == [3, 4, 5]


@pytest.mark.parametrize("action", ["drop", "refuse", "500"])
def test_a_commit_whose_answer_is_lost_counts_once(
    proxy: tuple[FaultyProxy, Settings], action: str
) -> None:
    running, settings = proxy
    lake = Lake(settings)
    cuts = [stage(lake.storage, "orders", n, Range(0, 5 * n - 4, 5 * n)) for n in (1, 2)]
    for n, cut in enumerate(cuts):
        ends = f"v{n + 2}.metadata.json"
        running.inject(Fault(_put_of(ends), action, times=2))
        assert put(lake, cut) == 5
    assert rows(lake) == [(0, n) for n in range(1, 11)]


def test_a_commit_that_never_gets_an_answer_is_found_by_the_next(
    proxy: tuple[FaultyProxy, Settings],
) -> None:
    running, settings = proxy
    lake = Lake(settings)
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 5))
    lake.ensure_table("orders")
    running.inject(Fault(_put_of("v2.metadata.json"), "drop", times=1000))
    assert put(lake, cut) == 5, "the create was read back"
    assert put(Lake(settings), cut) == 0
    assert rows(lake) == [(0, n) for n in range(1, 6)]


def test_a_writer_that_is_followed_at_once_has_committed(
    proxy: tuple[FaultyProxy, Settings],
) -> None:
    running, settings = proxy
    lake, other = Lake(settings), Lake(settings)
    lake.ensure_table("orders")

    def follow() -> None:
        change(other, load(other), theirs="yes")

    running.inject(Fault(_put_of("v2.metadata.json"), "after", call=follow))
    change(lake, load(lake), mine="yes")
    assert version(lake) == 3
    assert load(lake).properties.keys() >= {"mine", "theirs"}


def _put_of(ends: str) -> Match:
    return lambda method, path: method == "PUT" and path.partition("?")[0].endswith(ends)
