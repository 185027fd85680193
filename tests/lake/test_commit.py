"""The fence: what is committed once stays once, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lake.staging import HOUR, Tombstones, stage, stage_file
from tests.lake.worlds import put, rows
from zombi_platform.cuts import CutState, Range
from zombi_platform.errors import CorruptionError, InvalidRequestError, LakeConflictError
from zombi_platform.failpoints import FailpointError, arm
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(Settings(data_dir=tmp_path))


def test_a_commit_moves_watermarks_and_rows_together(lake: Lake) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3), Range(4_000_000_000, 1, 2))
    assert put(lake, cut) == 5
    state = lake.require_state("orders")
    assert state.watermarks == {0: 3, 4_000_000_000: 2}
    assert rows(lake) == [(0, 1), (0, 2), (0, 3), (4_000_000_000, 1), (4_000_000_000, 2)]
    assert lake.verify("orders", [cut]).snapshots == {1: state.snapshot_id}


def test_committing_again_adds_nothing(lake: Lake) -> None:
    first, second = (
        stage(lake.storage, "orders", 1, Range(0, 1, 3)),
        stage(lake.storage, "orders", 2, Range(0, 4, 6), Range(1, 1, 1)),
    )
    assert put(lake, first) == 3
    assert put(lake, first) == 0
    assert put(lake, first, second) == 4
    assert put(lake, first, second) == 0
    assert len(rows(lake)) == 7


@pytest.mark.parametrize(
    "part", [Range(0, 3, 5), Range(0, 5, 6), Range(0, 1, 2)], ids=["overlap", "gap", "before"]
)
def test_a_cut_that_does_not_fit_is_refused(lake: Lake, part: Range) -> None:
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3)))
    with pytest.raises(LakeConflictError, match=r"stands at 3 in partition 0") as raised:
        put(lake, stage(lake.storage, "orders", 2, part))
    assert raised.value.code == "FENCE_MISMATCH"
    assert len(rows(lake)) == 3


def test_cuts_must_follow_each_other(lake: Lake) -> None:
    first, third = (
        stage(lake.storage, "orders", 1, Range(0, 1, 3)),
        stage(lake.storage, "orders", 3, Range(0, 7, 9)),
    )
    with pytest.raises(InvalidRequestError, match="begins after 6 in partition 0"):
        put(lake, first, third)


@pytest.mark.parametrize(
    "wrong", [{"events": 4}, {"bytes": 1}, {"last": 4}, {"partition": 1}, {"hour": HOUR + 1}]
)
def test_a_file_that_is_not_as_recorded_is_not_committed(lake: Lake, wrong: dict[str, int]) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    ranges = (Range(0, 1, 4),) if "events" in wrong else cut.ranges
    lying = replace(cut, files=(replace(cut.files[0], **wrong),), ranges=ranges)
    with pytest.raises(CorruptionError, match="is not what was staged"):
        put(lake, lying)


def test_a_file_that_is_gone_is_not_committed(lake: Lake) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    lake.storage.delete([cut.files[0].path])
    with pytest.raises(CorruptionError, match="is gone"):
        put(lake, cut)


def test_a_crash_after_the_commit_is_found_out_by_the_next_worker(lake: Lake) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    arm("commit.done=error")
    with pytest.raises(FailpointError):
        put(lake, cut)
    assert put(lake, cut) == 0
    assert len(rows(lake)) == 3


def test_files_of_a_commit_that_never_happened_are_swept(lake: Lake) -> None:
    tombstones = Tombstones()
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    arm("commit.manifests-written=error")
    with pytest.raises(FailpointError):
        lake.commit("orders", [cut], before_write=tombstones)
    lake.commit("orders", [cut], before_write=tombstones)
    stray = stage_file(lake.storage, "orders", "stray", 0, Range(0, 1, 3), HOUR).path
    swept = lake.sweep("orders", [*tombstones.paths, stray, cut.files[0].path], tombstones.prefixes)
    assert len(swept.deleted) == 3, "a manifest, a manifest list and the stray"
    assert stray in swept.deleted
    assert cut.files[0].path in swept.kept
    assert len(rows(lake)) == 3


@pytest.mark.parametrize("made_again", [False, True])
def test_a_first_cut_of_a_partition_does_not_hide_that_the_table_was_dropped(
    lake: Lake, made_again: bool
) -> None:
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3)))
    lake.catalog.drop_table((lake.namespace, "orders"))
    if made_again:
        lake.ensure_table("orders")
    with pytest.raises(LakeConflictError) as raised:
        put(lake, stage(lake.storage, "orders", 2, Range(1, 1, 3)))
    assert raised.value.code == "TABLE_DROPPED"


def test_a_rollback_is_found_when_the_snapshot_has_expired_since(lake: Lake) -> None:
    cuts = [stage(lake.storage, "orders", n, Range(0, 3 * n - 2, 3 * n)) for n in (1, 2, 3)]
    for cut in cuts[:2]:
        put(lake, cut)
    latest, older = (snapshot.id for snapshot in lake.require_state("orders").lineage)
    name = (lake.namespace, "orders")
    lake.catalog.load_table(name).manage_snapshots().rollback_to_snapshot(older).commit()
    lake.catalog.load_table(name).maintenance.expire_snapshots().by_id(latest).commit()
    committed = replace(cuts[1], state=CutState.COMMITTED)
    for act in (lambda: put(lake, cuts[2]), lambda: lake.verify("orders", [committed])):
        with pytest.raises(LakeConflictError, match=str(latest)) as raised:
            act()
        assert raised.value.code == "TABLE_ROLLED_BACK"


def test_metadata_of_an_external_catalog_is_not_swept(tmp_path: Path) -> None:
    lake = Lake(
        Settings(
            data_dir=tmp_path,
            catalog="sql",
            catalog_uri=f"sqlite:///{tmp_path}/catalog.db",
            catalog_url="http://127.0.0.1:9",
        )
    )
    tombstones = Tombstones()
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    lake.commit("orders", [cut], before_write=tombstones)
    directory, _, ours = lake.require_state("orders").metadata_location.rpartition("/")
    theirs = f"{directory}/{ours.partition('-')[0]}-theirs.metadata.json"
    lake.storage.write(theirs, b"{}")
    lake.sweep("orders", tombstones.paths, tombstones.prefixes)
    assert lake.storage.exists(theirs)
