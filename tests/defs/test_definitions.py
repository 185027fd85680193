"""What Dagster shows is pinned: a change of keys, partitions or triggers is made on purpose."""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg
import pytest

from zombi_platform.definitions import defs
from zombi_platform.defs.assembly import assemble
from zombi_platform.defs.spark import SparkResource
from zombi_platform.settings import Settings


@pytest.fixture(scope="module")
def loaded() -> dg.Definitions:
    return assemble(Settings(engine="arrow"), datetime.now(UTC))


def test_the_entry_point_loads() -> None:
    assert defs().resolve_job_def("flush").name == "flush"


def test_spark_has_a_session_of_its_own_that_comes_from_the_settings() -> None:
    settings = Settings(engine="spark", spark_remote="sc://somewhere:15002")
    spark = assemble(settings, datetime.now(UTC)).resources or {}
    assert set(spark) == {"gateway", "lake", "engine", "worker", "spark"}
    resource = spark["spark"]
    assert isinstance(resource, SparkResource)
    assert resource.connection.remote == "sc://somewhere:15002"
    assert resource.connection.ship_code


def test_assets_and_their_partitions(loaded: dg.Definitions) -> None:
    graph = loaded.resolve_asset_graph()
    found = {
        key.to_user_string(): (
            graph.get(key).group_name,
            sorted(parent.to_user_string() for parent in graph.get(key).parent_keys),
            sorted(graph.get(key).kinds),
            shape(graph.get(key).partitions_def),
        )
        for key in graph.get_all_asset_keys()
    }
    assert found == {
        "hot_buffer": ("flush", [], ["rocksdb"], "tables"),
        "hot_cut": ("flush", ["hot_buffer"], ["rocksdb"], "tables"),
        "staged_files": ("flush", ["hot_cut"], ["parquet"], "tables"),
        "snapshot": ("flush", ["staged_files"], ["iceberg"], "tables"),
        "hot_cleanup": ("flush", ["snapshot"], ["rocksdb"], "tables"),
        "merged_files": ("flush", ["hot_cleanup"], ["iceberg", "parquet"], "tables"),
        "events": ("hours", ["snapshot"], ["iceberg"], "hour x table"),
    }


def shape(partitions: dg.PartitionsDefinition | None) -> str:
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return " x ".join(part.name for part in partitions.partitions_defs)
    assert isinstance(partitions, dg.DynamicPartitionsDefinition)
    return partitions.name or ""


def test_every_asset_says_what_it_is_and_whose(loaded: dg.Definitions) -> None:
    graph = loaded.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.description
        assert node.owners
        assert node.kinds


def test_faults_are_retried_by_every_step(loaded: dg.Definitions) -> None:
    job = loaded.resolve_job_def("flush")
    policies = {node.name: node.definition.retry_policy for node in job.graph.nodes}
    assert policies.keys() == {
        "hot_cut",
        "staged_files",
        "snapshot",
        "snapshot_rows_reconcile",
        "hot_cleanup",
        "merged_files",
    }
    retries = {name: policy and policy.max_retries for name, policy in policies.items()}
    assert retries.pop("merged_files") == 1
    assert set(retries.values()) == {3}


def test_the_check_blocks_what_follows_it(loaded: dg.Definitions) -> None:
    graph = loaded.resolve_asset_graph()
    (key,) = graph.asset_check_keys
    assert key.to_user_string() == "snapshot:rows_reconcile"
    assert graph.get(key).blocking


def test_jobs_sensors_and_schedules(loaded: dg.Definitions) -> None:
    repository = loaded.get_repository_def()
    assert sorted(repository.job_names) == ["__ASSET_JOB", "flush", "flush_all"]
    assert {
        sensor.name: (sensor.default_status.value, sensor.minimum_interval_seconds)
        for sensor in repository.sensor_defs
    } == {
        "tables_due": ("RUNNING", 5),
        "failed_runs": ("RUNNING", 15),
        "old_runs": ("RUNNING", 600),
    }
    assert {
        schedule.name: (schedule.cron_schedule, schedule.default_status.value)
        for schedule in repository.schedule_defs
    } == {"daily_flush": ("17 3 * * *", "RUNNING")}
    assert set(repository.get_top_level_resources()) == {"gateway", "lake", "engine", "worker"}


def test_a_run_takes_one_process(loaded: dg.Definitions) -> None:
    assert loaded.resolve_job_def("flush").executor_def.name == "in_process"
