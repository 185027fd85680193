"""The flush as Dagster runs it, over a real gateway and a real lake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.defs.flushing import World, hide, metadata, put_back, world
from zombi_platform.defs.sensors import delete_old_runs

STEPS = ("hot_cut", "staged_files", "snapshot", "hot_cleanup")
MERGED_AT = 10


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One for all tests; each has tables of its own."""
    with world(tmp_path_factory.mktemp("world")) as made:
        yield made


def place(here: World, table: str) -> Path:
    return here.settings.data_dir / "warehouse" / table


def hours_of(here: World, table: str) -> list[dg.EventLogRecord]:
    """What is on the grid for a table."""
    found = here.instance.fetch_materializations(dg.AssetKey("events"), limit=1000).records
    return [record for record in found if (record.partition_key or "").endswith(f"|{table}")]


def test_a_run_brings_everything_to_the_lake_once(here: World) -> None:
    here.send("once", 900, partitions=3, hours=2)
    result = here.flush("once")
    assert result.success
    rows = here.rows("once")
    assert len(rows) == 900
    assert set(rows.values()) == {1}
    assert here.progress("once").events == 0


def test_a_run_says_what_it_did(here: World) -> None:
    here.send("said", 600, partitions=2, hours=3)
    result = here.flush("said")
    cut, staged, snapshot, cleanup = (metadata(result, step) for step in STEPS)
    assert (cut["events"], cut["partitions"]) == (600, 2)
    assert (staged["events"], staged["files"], staged["engine"]) == (600, 6, "arrow")
    assert (snapshot["events"], snapshot["files"]) == (600, 6)
    assert str(snapshot["metadata_location"]).endswith(".metadata.json")
    assert len(snapshot["hours"].records) == 3  # type: ignore[attr-defined]
    assert (cleanup["deleted_events"], cleanup["remaining_events"]) == (600, 0)
    (check,) = result.get_asset_check_evaluations()
    assert check.passed
    assert check.metadata["events"].value == 600


def test_hours_appear_on_the_grid_without_a_run_of_their_own(here: World) -> None:
    here.send("grid", 300, hours=3)
    here.flush("grid")
    records = hours_of(here, "grid")
    found = {record.partition_key: record.asset_materialization for record in records}
    assert len(found) == 3
    assert {m.metadata["added_events"].value for m in found.values() if m} == {100}
    assert {record.run_id for record in records} == {""}


def test_nothing_new_is_no_snapshot(here: World) -> None:
    here.send("quiet", 10)
    here.flush("quiet")
    before = here.progress("quiet")
    result = here.flush("quiet")
    assert result.success
    assert metadata(result, "snapshot")["events"] == 0
    assert here.progress("quiet").watermarks == before.watermarks


def test_a_run_of_the_sensor_commits_only_what_is_due(tmp_path: Path) -> None:
    with world(tmp_path, snapshot_max_age_secs="3600") as here:
        here.send("orders", 10)
        result = here.flush("orders", tags={"zombi/due": "a test"})
        assert result.success
        assert [cut.state for cut in here.progress("orders").cuts] == ["staged"]
        assert result.get_step_skipped_events()
        assert here.flush("orders").success
        assert len(here.rows("orders")) == 10


def test_a_dropped_table_fails_for_good_and_without_retries(here: World) -> None:
    here.send("dropped", 10)
    here.flush("dropped")
    away = hide(place(here, "dropped"))
    here.send("dropped", 5)
    result = here.flush("dropped")
    assert not result.success
    assert not [event for event in result.all_events if event.is_step_up_for_retry]
    failure = here.progress("dropped").failure
    assert failure is not None
    assert (failure.code, failure.transient) == ("TABLE_DROPPED", False)
    assert failure.url is not None and failure.url.endswith(f"/runs/{result.run_id}")
    put_back(place(here, "dropped"), away)
    assert here.flush("dropped").success
    assert here.progress("dropped").failure is None
    assert len(here.rows("dropped")) == 15


def test_nothing_is_deleted_while_the_check_fails(here: World) -> None:
    here.send("checked", 50)
    until_commit = [dg.AssetKey(step) for step in STEPS[:3]]
    assert here.flush("checked", asset_selection=until_commit).success
    away = hide(place(here, "checked"))
    job = here.definitions.resolve_implicit_global_asset_job_def()
    checked = job.execute_in_process(
        partition_key="checked",
        instance=here.instance,
        raise_on_error=False,
        asset_selection=[dg.AssetKey("snapshot"), dg.AssetKey("hot_cleanup")],
    )
    assert not checked.success
    assert here.progress("checked").events == 50
    put_back(place(here, "checked"), away)
    assert here.flush("checked").success
    assert here.progress("checked").events == 0
    assert len(here.rows("checked")) == 50


def test_many_tables_share_a_run_and_one_that_fails_stops_no_other(here: World) -> None:
    for table in ("a", "broken", "c-d", "c__d"):
        here.send(table, 20)
        here.instance.add_dynamic_partitions("tables", [table])
    here.flush("broken")
    away = hide(place(here, "broken"))
    here.send("broken", 1)
    job = here.definitions.resolve_job_def("flush_all")
    result = job.execute_in_process(instance=here.instance, raise_on_error=False)
    assert not result.success
    for table in ("a", "c-d", "c__d"):
        assert len(here.rows(table)) == 20
        assert here.progress(table).events == 0
    put_back(place(here, "broken"), away)
    for step in STEPS:
        records = here.instance.fetch_materializations(dg.AssetKey(step), limit=10).records
        assert {"a", "c-d"} <= {record.partition_key for record in records}
    failure = here.progress("broken").failure
    assert failure is not None and failure.code == "TABLE_DROPPED"


def test_small_files_are_merged_and_the_run_says_so(here: World) -> None:
    for _ in range(MERGED_AT):
        here.send("small", 20, partitions=2)
        result = here.flush("small")
        assert result.success
    told = metadata(result, "merged_files")
    assert (told["files_before"], told["files_after"], told["events"]) == (20, 2, 200)
    assert set(here.rows("small").values()) == {1}
    assert len(here.rows("small")) == 200
    here.send("small", 20)
    assert metadata(here.flush("small"), "merged_files")["files_before"] == 0


def test_a_merge_that_fails_is_seen_and_holds_no_flush_up(here: World) -> None:
    for _ in range(MERGED_AT - 1):
        here.send("torn", 20)
        assert here.flush("torn").success
    lost = next(place(here, "torn").rglob("*.parquet"))
    content = lost.read_bytes()
    lost.unlink()
    here.send("torn", 20)
    result = here.flush("torn")
    assert [event.step_key for event in result.get_step_failure_events()] == ["merged_files"]
    assert not [event for event in result.all_events if event.is_step_up_for_retry]
    assert here.progress("torn").events == 0, "the flush itself is done"
    assert here.progress("torn").failure is None, "so that the next one need not wait"
    lost.write_bytes(content)
    here.send("torn", 20)
    assert metadata(here.flush("torn"), "merged_files")["files_before"] == MERGED_AT + 1
    assert here.rows("torn") == {(0, n): 1 for n in range(1, 20 * (MERGED_AT + 1) + 1)}


def test_running_an_hour_reads_it_from_the_lake(here: World) -> None:
    here.send("hours", 300, hours=3)
    here.flush("hours")
    records = hours_of(here, "hours")
    keys = sorted(record.partition_key or "" for record in records)
    job = here.definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(
        instance=here.instance,
        asset_selection=[dg.AssetKey("events")],
        tags={
            "dagster/asset_partition_range_start": keys[0],
            "dagster/asset_partition_range_end": keys[-1],
        },
    )
    found = result.asset_materializations_for_node("events")
    assert sorted(one.partition or "" for one in found) == keys
    assert [one.metadata["events"].value for one in found] == [100, 100, 100]
    assert all(len(one.metadata["sample"].value.records) == 5 for one in found)  # type: ignore[union-attr]


def test_old_runs_are_deleted_but_not_what_they_committed(here: World) -> None:
    for _ in range(3):
        here.send("old", 1)
        here.flush("old")
    assert delete_old_runs(here.instance, kept=1) >= 2
    assert delete_old_runs(here.instance, kept=1) == 0
    assert here.instance.get_runs_count() == 1
    assert hours_of(here, "old")
    assert len(here.rows("old")) == 3
