"""What every catalog must do, whoever else creates, commits, rolls back or drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table

from tests.lake.staging import HOUR, Tombstones, events, stage
from tests.lake.worlds import EVERYWHERE, RACING, World, make_world, put, rows
from zombi_platform.cuts import Cut, CutState, Range
from zombi_platform.errors import LakeConflictError
from zombi_platform.lake.lake import Lake

# pyiceberg, as somebody else's writer, has no bloom filters.
pytestmark = pytest.mark.filterwarnings("ignore:Parquet writer option")


@pytest.fixture(params=EVERYWHERE)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return make_world(request.param, request, tmp_path)


def theirs(lake: Lake) -> Table:
    """The table as somebody with plain pyiceberg sees it."""
    catalog: Catalog = lake.catalog
    return catalog.load_table((lake.namespace, "orders"))


class Interrupted:
    """Lets somebody else act between a worker's look at the table and its commit, once."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def __call__(self, paths: Sequence[str], prefixes: Sequence[str]) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


def numbers(*parts: Range) -> list[tuple[int, int]]:
    return sorted((p.partition, n) for p in parts for n in range(p.first, p.last + 1))


def test_an_unknown_table_has_no_state(world: World) -> None:
    lake = world.worker()
    assert lake.state("orders") is None
    assert lake.tables() == []
    assert lake.check() == []


@pytest.mark.parametrize("world", RACING, indirect=True)
def test_workers_that_make_a_table_at_once_get_the_same(world: World) -> None:
    workers = [world.worker() for _ in range(6)]
    with ThreadPoolExecutor(len(workers)) as pool:
        states = list(pool.map(lambda lake: lake.ensure_table("orders"), workers))
    assert len({state.uuid for state in states}) == 1
    assert world.worker().tables() == ["orders"]


@pytest.mark.parametrize("world", RACING, indirect=True)
def test_workers_that_commit_the_same_cut_at_once_add_it_once(world: World) -> None:
    part = Range(0, 1, 20)
    cut = stage(world.worker().storage, "orders", 1, part)
    workers = [world.worker() for _ in range(5)]
    with ThreadPoolExecutor(len(workers)) as pool:
        added = list(pool.map(lambda lake: put(lake, cut), workers))
    assert sorted(added) == [0, 0, 0, 0, 20]
    assert rows(workers[0]) == numbers(part)


def test_a_worker_that_was_overtaken_adds_nothing(world: World) -> None:
    part = Range(0, 1, 9)
    slow, quick = world.worker(), world.worker()
    cut = stage(slow.storage, "orders", 1, part)
    done = slow.commit("orders", [cut], before_write=Interrupted(lambda: put(quick, cut)))
    assert done.events == 0
    assert done.watermarks == {0: 9}
    assert rows(slow) == numbers(part)


def test_a_worker_that_was_overtaken_by_other_cuts_of_its_range_is_refused(world: World) -> None:
    slow, quick = world.worker(), world.worker()
    mine = stage(slow.storage, "orders", 1, Range(0, 1, 9))
    other = stage(slow.storage, "orders", 1, Range(0, 1, 5), hour=HOUR + 1)
    with pytest.raises(LakeConflictError) as raised:
        slow.commit("orders", [mine], before_write=Interrupted(lambda: put(quick, other)))
    assert raised.value.code == "FENCE_MISMATCH"
    assert rows(slow) == numbers(Range(0, 1, 5))


def test_gateways_with_their_own_partitions_share_a_table(world: World) -> None:
    one, two = world.worker(), world.worker()
    mine = stage(one.storage, "orders", 1, Range(0, 1, 9))
    other = stage(one.storage, "orders", 1, Range(1, 1, 5))
    done = one.commit("orders", [mine], before_write=Interrupted(lambda: put(two, other)))
    assert done.events == 9
    assert rows(one) == numbers(Range(0, 1, 9), Range(1, 1, 5))
    verified = one.verify("orders", [mine]).snapshots[1], two.verify("orders", [other]).snapshots[1]
    assert verified[0] != verified[1]


def test_somebody_elses_append_is_kept(world: World) -> None:
    lake = world.worker()
    first, second = (
        stage(lake.storage, "orders", 1, Range(0, 1, 3)),
        stage(lake.storage, "orders", 2, Range(0, 4, 6)),
    )
    put(lake, first)
    append = Interrupted(lambda: theirs(lake).append(events("orders", Range(9, 1, 2))))
    assert lake.commit("orders", [second], before_write=append).events == 3
    assert rows(lake) == numbers(Range(0, 1, 6), Range(9, 1, 2))
    assert len(lake.verify("orders", [first, second]).snapshots) == 2


def test_somebody_elses_rewrite_is_kept(world: World) -> None:
    lake = world.worker()
    first, second = (
        stage(lake.storage, "orders", 1, Range(0, 1, 3)),
        stage(lake.storage, "orders", 2, Range(0, 4, 6)),
    )
    put(lake, first)
    rewrite = Interrupted(lambda: theirs(lake).overwrite(events("orders", Range(0, 1, 3))))
    assert lake.commit("orders", [second], before_write=rewrite).events == 3
    assert rows(lake) == numbers(Range(0, 1, 6))
    assert len(lake.verify("orders", [first, second]).snapshots) == 2


def test_a_rollback_stops_everything_until_it_is_undone(world: World) -> None:
    lake = world.worker()
    cuts = [stage(lake.storage, "orders", n, Range(0, 3 * n - 2, 3 * n)) for n in (1, 2, 3)]
    for cut in cuts[:2]:
        put(lake, cut)
    state = lake.require_state("orders")
    latest, older = state.lineage[0].id, state.lineage[1].id
    theirs(lake).manage_snapshots().rollback_to_snapshot(older).commit()
    for act in (lambda: put(lake, cuts[2]), lambda: lake.verify("orders", cuts[:1])):
        with pytest.raises(LakeConflictError, match=str(latest)) as raised:
            act()
        assert raised.value.code == "TABLE_ROLLED_BACK"
    theirs(lake).manage_snapshots().set_current_snapshot(latest).commit()
    put(lake, cuts[2])
    assert rows(lake) == numbers(Range(0, 1, 9))


@pytest.mark.parametrize("made_again", [False, True])
def test_a_dropped_table_stops_everything(world: World, made_again: bool) -> None:
    lake = world.worker()
    cuts = [stage(lake.storage, "orders", n, Range(0, 3 * n - 2, 3 * n)) for n in (1, 2)]
    put(lake, cuts[0])
    lake.catalog.drop_table((lake.namespace, "orders"))
    assert lake.state("orders") is None
    if made_again:
        lake.ensure_table("orders")
    with pytest.raises(LakeConflictError) as raised:
        put(lake, cuts[1])
    assert raised.value.code == "TABLE_DROPPED"
    with pytest.raises(LakeConflictError):
        lake.verify("orders", cuts[:1])
    if not made_again:
        with pytest.raises(LakeConflictError, match="no proof"):
            lake.sweep("orders", [cuts[0].files[0].path])
    assert lake.storage.exists(cuts[0].files[0].path)


def test_what_is_not_committed_is_not_verified(world: World) -> None:
    lake = world.worker()
    lake.ensure_table("orders")
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    with pytest.raises(LakeConflictError, match="ends at 0 in the lake and at 3") as raised:
        lake.verify("orders", [cut])
    assert raised.value.code == "NOT_IN_LAKE"


def test_old_snapshots_expire_and_their_files_go(world: World) -> None:
    lake = world.worker(snapshots_kept=3)
    tombstones = Tombstones()
    cuts = [stage(lake.storage, "orders", n, Range(0, 2 * n - 1, 2 * n)) for n in range(1, 9)]
    for cut in cuts[:4]:
        lake.commit("orders", [cut], before_write=tombstones)
    theirs(lake).overwrite(events("orders", Range(0, 1, 8)))
    for cut in cuts[4:]:
        lake.commit("orders", [cut], before_write=tombstones)
    state = lake.require_state("orders")
    assert len(state.snapshot_ids) == 3
    assert rows(lake) == numbers(Range(0, 1, 16))
    reported = [replace(cut, state=CutState.COMMITTED) for cut in cuts]
    found = lake.verify("orders", reported).snapshots
    assert [found[1], found[8]] == [None, state.snapshot_id]
    swept = lake.sweep("orders", tombstones.paths, tombstones.prefixes)
    assert {file.path for cut in cuts[:4] for file in cut.files} <= set(swept.deleted)
    # Hadoop's file system, below the REST catalog, leaves a checksum beside each file.
    assert [path for path in lake.strays("orders") if not path.endswith(".crc")] == []
    assert rows(lake) == numbers(Range(0, 1, 16))


@pytest.mark.parametrize("world", RACING, indirect=True)
def test_commits_race_with_somebody_who_appends_all_the_time(world: World) -> None:
    lake = world.worker()
    lake.ensure_table("orders")
    cuts: list[Cut] = [
        stage(lake.storage, "orders", n, Range(0, 2 * n - 1, 2 * n)) for n in range(1, 9)
    ]
    with ThreadPoolExecutor(1) as pool:
        appended = pool.submit(_append_often, world, 4)
        for cut in cuts:
            put(lake, cut)
        appended.result()
    assert rows(lake) == numbers(Range(0, 1, 16), *[Range(7, n, n) for n in range(4)])


def _append_often(world: World, times: int) -> None:
    lake = world.worker()
    for n in range(times):
        while True:
            # pyiceberg gives up after five tries, which a busy table may well take.
            with suppress(CommitFailedException):
                theirs(lake).append(events("orders", Range(7, n, n)))
                break
