"""A merge in the lake: the same events in fewer files, or the table as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import StringType

from tests.lake.staging import HOUR, Tombstones, events, merge, stage
from tests.lake.worlds import EVERYWHERE, World, make_world, put, rows
from zombi_platform.cuts import Range
from zombi_platform.errors import CorruptionError, LakeConflictError
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.replacement import MergePlan
from zombi_platform.settings import Settings

# pyiceberg, as somebody else's writer, has no bloom filters.
pytestmark = pytest.mark.filterwarnings("ignore:Parquet writer option")

AT = 4
PARTITIONS = (0, 9)
CUTS = 5


@pytest.fixture(params=EVERYWHERE)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return make_world(request.param, request, tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(Settings(data_dir=tmp_path, merge_files_at=AT))


def fill(lake: Lake, cuts: Sequence[int] = range(1, CUTS + 1)) -> list[tuple[int, int]]:
    """Small flushes of two partitions; returns what readers must find from now on."""
    for n in cuts:
        parts = [Range(p, 3 * n - 2, 3 * n) for p in PARTITIONS]
        put(lake, stage(lake.storage, "orders", n, *parts))
    return sorted((p, n) for p in PARTITIONS for n in range(1, 3 * max(cuts) + 1))


def planned(lake: Lake) -> MergePlan:
    plan = lake.plan_merge("orders")
    assert plan is not None
    return plan


def files(lake: Lake) -> set[str]:
    return {task.file.file_path for task in theirs(lake).scan().plan_files()}


def theirs(lake: Lake) -> Table:
    """The table as somebody with plain pyiceberg sees it."""
    return lake.catalog.load_table((lake.namespace, "orders"))


def test_merged_files_take_the_place_of_small_ones(world: World) -> None:
    lake = world.worker(merge_files_at=AT)
    expected = fill(lake)
    before = lake.require_state("orders")
    plan = planned(lake)
    done = lake.replace(plan, merge(lake.storage, plan), before_write=Tombstones())
    assert done is not None
    assert (done.files_before, done.files_after, done.events) == (2 * CUTS, 2, 6 * CUTS)
    assert rows(lake) == expected
    assert files(lake) == {one.file.path for one in merge(lake.storage, plan)}
    after = lake.require_state("orders")
    assert (after.snapshot_id, after.lineage[0].operation) == (done.snapshot_id, "replace")
    assert (after.watermarks, after.marks) == (before.watermarks, before.marks)
    assert lake.plan_merge("orders") is None, "there is nothing left to merge"
    head = theirs(lake).current_snapshot()
    assert head is not None and head.summary is not None
    assert head.summary.operation is Operation.REPLACE
    totals = {name: head.summary[f"total-{name}"] for name in ("data-files", "records")}
    assert totals == {"data-files": "2", "records": str(6 * CUTS)}


def test_commits_go_on_after_a_merge(world: World) -> None:
    lake = world.worker(merge_files_at=AT)
    fill(lake)
    plan = planned(lake)
    assert lake.replace(plan, merge(lake.storage, plan), before_write=Tombstones())
    expected = fill(lake, range(CUTS + 1, 2 * CUTS + 1))
    assert rows(lake) == expected
    assert len(files(lake)) == 2 + 2 * CUTS
    cut = stage(lake.storage, "orders", 2 * CUTS, *[Range(p, 28, 30) for p in PARTITIONS])
    assert len(lake.verify("orders", [cut]).snapshots) == 1


def test_a_table_that_has_moved_keeps_its_files(world: World) -> None:
    lake = world.worker(merge_files_at=AT)
    fill(lake)
    plan = planned(lake)
    expected = fill(lake, [CUTS + 1])
    before = files(lake)
    assert lake.replace(plan, merge(lake.storage, plan), before_write=Tombstones()) is None
    assert (rows(lake), files(lake)) == (expected, before)


def test_of_two_that_merge_the_same_files_one_does(world: World) -> None:
    lake = world.worker(merge_files_at=AT)
    expected = fill(lake)
    one, two = planned(lake), planned(world.worker(merge_files_at=AT))
    merged = merge(lake.storage, one)
    assert lake.replace(one, merged, before_write=Tombstones()) is not None
    assert lake.replace(two, merged, before_write=Tombstones()) is None
    assert rows(lake) == expected


def test_replaced_files_go_when_their_last_snapshot_has_expired(world: World) -> None:
    lake = world.worker(merge_files_at=AT, snapshots_kept=2)
    fill(lake)
    old = files(lake)
    tombstones = Tombstones()
    plan = planned(lake)
    merged = merge(lake.storage, plan)
    tombstones([one.file.path for one in merged], [])
    assert lake.replace(plan, merged, before_write=tombstones) is not None
    swept = lake.sweep("orders", [*tombstones.paths, *old], tombstones.prefixes)
    assert not old & set(swept.deleted), "the snapshot before the merge still has them"
    for n in (CUTS + 1, CUTS + 2):
        parts = [Range(p, 3 * n - 2, 3 * n) for p in PARTITIONS]
        cut = stage(lake.storage, "orders", n, *parts)
        lake.commit("orders", [cut], before_write=tombstones)
    assert old <= set(tombstones.paths), "expiry announced what it orphans"
    swept = lake.sweep("orders", tombstones.paths, tombstones.prefixes)
    assert old <= set(swept.deleted)
    assert rows(lake) == sorted((p, n) for p in PARTITIONS for n in range(1, 3 * CUTS + 7))


def test_what_a_sleeping_worker_may_yet_commit_is_not_swept(lake: Lake) -> None:
    expected = fill(lake)
    plan = planned(lake)
    merged = merge(lake.storage, plan)
    tombstones = Tombstones()
    tombstones([one.file.path for one in merged], [])

    def sweep(paths: Sequence[str], prefixes: Sequence[str]) -> None:
        """Somebody sweeps when the merge has announced all and committed nothing."""
        tombstones(paths, prefixes)
        swept = lake.sweep("orders", tombstones.paths, tombstones.prefixes)
        assert swept.deleted == ()
        assert set(swept.waiting) >= {one.file.path for one in merged}

    assert lake.replace(plan, merged, before_write=sweep) is not None
    assert rows(lake) == expected


def test_what_was_merged_in_vain_is_swept(lake: Lake) -> None:
    fill(lake)
    plan = planned(lake)
    tombstones = Tombstones()
    expected = fill(lake, [CUTS + 1])
    merged = merge(lake.storage, plan)
    tombstones([one.file.path for one in merged], [])
    assert lake.replace(plan, merged, before_write=tombstones) is None
    lake.sweep("orders", tombstones.paths, tombstones.prefixes)
    assert lake.strays("orders") == []
    assert rows(lake) == expected


def append_others(lake: Lake) -> None:
    theirs(lake).append(events("orders", Range(7, 1, 2)))


def add_column(lake: Lake) -> None:
    with theirs(lake).update_schema() as update:
        update.add_column("theirs", StringType())


def roll_back(lake: Lake) -> None:
    older = lake.require_state("orders").lineage[2].id
    theirs(lake).manage_snapshots().rollback_to_snapshot(older).commit()


def test_files_of_others_stay_what_they_are(lake: Lake) -> None:
    fill(lake)
    for _ in range(AT):
        append_others(lake)
    plan = planned(lake)
    assert {group.partition for group in plan.groups} == set(PARTITIONS)


def test_a_table_with_columns_of_others_is_left_alone(lake: Lake) -> None:
    fill(lake)
    add_column(lake)
    assert lake.plan_merge("orders") is None


def test_a_table_that_was_rolled_back_is_left_alone(lake: Lake) -> None:
    fill(lake, range(1, 2 * CUTS))
    roll_back(lake)
    with pytest.raises(LakeConflictError, match="rolled back"):
        lake.plan_merge("orders")


@pytest.mark.parametrize("meanwhile", [append_others, add_column, roll_back])
def test_whatever_others_do_meanwhile_is_not_undone(
    lake: Lake, meanwhile: Callable[[Lake], None]
) -> None:
    fill(lake)
    plan = planned(lake)
    merged = merge(lake.storage, plan)
    meanwhile(lake)
    before = rows(lake)
    assert lake.replace(plan, merged, before_write=Tombstones()) is None
    assert rows(lake) == before


def test_a_merged_file_with_other_events_is_refused(lake: Lake) -> None:
    expected = fill(lake)
    plan = planned(lake)
    merged = merge(lake.storage, plan)
    short = replace(merged[0], file=replace(merged[0].file, events=1))
    with pytest.raises(CorruptionError, match="stay in the table"):
        lake.replace(plan, [short, *merged[1:]], before_write=Tombstones())
    lake.storage.delete([merged[0].file.path])
    with pytest.raises(CorruptionError):
        lake.replace(plan, merged, before_write=Tombstones())
    assert rows(lake) == expected


def test_files_merged_twice_are_refused(lake: Lake) -> None:
    expected = fill(lake)
    plan = planned(lake)
    once = merge(lake.storage, plan)
    with pytest.raises(CorruptionError, match="into two others"):
        lake.replace(plan, [*once, *once], before_write=Tombstones())
    assert rows(lake) == expected


def test_another_partition_spec_of_others_hides_no_row(lake: Lake) -> None:
    """Files here keep the spec that they were written with, whatever the default is."""
    fill(lake)
    with theirs(lake).update_spec() as update:
        update.remove_field("event_date")
    expected = fill(lake, [CUTS + 1])
    append_others(lake)
    plan = planned(lake)
    assert lake.replace(plan, merge(lake.storage, plan), before_write=Tombstones()) is not None
    assert rows(lake) == sorted([*expected, (7, 1), (7, 2)])
    table = theirs(lake)
    for hour in ("event_hour = 8", "event_date = '2026-09-12' and event_hour = 8"):
        assert table.scan(hour, selected_fields=("sequence",)).to_arrow().num_rows == 6 * CUTS + 8
    assert table.scan("event_hour = 9").to_arrow().num_rows == 0


def test_what_a_rollback_past_a_merge_leaves_behind_is_known(world: World) -> None:
    fill(world.worker())
    lake = world.worker(merge_files_at=AT, snapshots_kept=2)
    last = lake.require_state("orders").snapshot_id
    assert last is not None
    plan, tombstones = planned(lake), Tombstones()
    merged = merge(lake.storage, plan)
    assert lake.replace(plan, merged, before_write=tombstones) is not None
    theirs(lake).manage_snapshots().rollback_to_snapshot(last).commit()
    for n in range(CUTS + 1, CUTS + 4):
        cut = stage(lake.storage, "orders", n, *[Range(p, 3 * n - 2, 3 * n) for p in PARTITIONS])
        lake.commit("orders", [cut], before_write=tombstones)
    assert {one.file.path for one in merged} <= set(tombstones.paths)
    lake.sweep("orders", tombstones.paths, tombstones.prefixes)
    assert [path for path in lake.strays("orders") if not path.endswith(".crc")] == []
    assert rows(lake) == sorted((p, n) for p in PARTITIONS for n in range(1, 3 * CUTS + 10))


def test_a_table_without_enough_small_files_is_not_read(lake: Lake) -> None:
    assert lake.plan_merge("orders") is None
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3), hour=HOUR))
    assert lake.plan_merge("orders") is None
