"""The sensors, over a real gateway and Dagster instance."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from tests.defs.flushing import World, world
from zombi_platform.defs.sensors import report_dead_run


def tick(here: World, cursor: str | None = None) -> dg.SensorResult:
    sensor = here.definitions.resolve_sensor_def("tables_due")
    with (
        here.client() as gateway,
        dg.build_sensor_context(
            instance=here.instance, cursor=cursor, resources={"gateway": gateway}
        ) as context,
    ):
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def requested(result: dg.SensorResult) -> list[tuple[str | None, str | None]]:
    return [(run.job_name, run.partition_key) for run in result.run_requests or []]


def test_a_table_below_its_thresholds_is_only_observed(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        here.send("orders", 10)
        result = tick(here)
        assert requested(result) == []
        (added,) = result.dynamic_partitions_requests or []
        assert added.partition_keys == ["orders"]
        (depth,) = result.asset_events
        assert (depth.asset_key.to_user_string(), depth.partition) == ("hot_buffer", "orders")
        assert depth.metadata["unflushed_events"].value == 10
        assert tick(here, result.cursor).asset_events == []


def test_one_table_gets_a_run_of_its_own_and_several_share_one(tmp_path: Path) -> None:
    with world(tmp_path, target_file_size_mb="1") as here:
        here.send("orders", 20_000)
        assert requested(tick(here)) == [("flush", "orders")]
        here.send("clicks", 20_000)
        (run,) = tick(here).run_requests or []
        assert run.job_name == "flush_all"
        assert run.run_config["ops"]["due_tables"]["config"]["tables"] == ["clicks", "orders"]


def test_no_second_run_while_one_is_at_it(tmp_path: Path) -> None:
    with world(tmp_path, target_file_size_mb="1") as here:
        here.send("orders", 20_000)
        here.instance.add_dynamic_partitions("tables", ["orders"])
        here.instance.create_run_for_job(
            here.definitions.resolve_job_def("flush"),
            tags={"dagster/partition": "orders"},
            status=dg.DagsterRunStatus.STARTED,
        )
        assert requested(tick(here)) == []


def test_a_stopped_gateway_is_no_error_of_the_sensor(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        sensor = here.definitions.resolve_sensor_def("tables_due")
        with here.client() as gateway:
            here.gateway.stop()
            with dg.build_sensor_context(
                instance=here.instance, resources={"gateway": gateway}
            ) as context:
                skipped = sensor(context)
        assert isinstance(skipped, dg.SkipReason)
        assert "asks again" in (skipped.skip_message or "")


def test_the_gateway_hears_of_a_run_that_died(tmp_path: Path) -> None:
    with world(tmp_path, flush_interval_secs="1") as here:
        here.send("orders", 1)
        run = here.instance.create_run_for_job(
            here.definitions.resolve_job_def("flush"), tags={"dagster/partition": "orders"}
        )
        with here.client() as gateway:
            report_dead_run(gateway, run, "the worker was killed", here.settings)
            report_dead_run(gateway, run, "told twice", here.settings)
        failure = here.progress("orders").failure
        assert failure is not None
        assert (failure.error, failure.transient) == ("the worker was killed", True)
        assert failure.run_id == run.run_id


def test_the_gateway_hears_nothing_of_a_merge_that_failed(tmp_path: Path) -> None:
    with world(tmp_path, merge_files_at="2") as here:
        for _ in range(2):
            here.send("orders", 5)
            for file in (here.settings.data_dir / "warehouse").rglob("*.parquet"):
                file.unlink()
            result = here.flush("orders")
        assert not result.success
        run = here.instance.get_run_by_id(result.run_id)
        assert run is not None
        sensor = here.definitions.resolve_sensor_def("failed_runs")
        with (
            here.client() as gateway,
            dg.build_run_status_sensor_context(
                "failed_runs",
                result.get_run_failure_event(),
                here.instance,
                run,
                resources={"gateway": gateway},
            ).for_run_failure() as context,
        ):
            sensor(context)
        assert here.progress("orders").failure is None
