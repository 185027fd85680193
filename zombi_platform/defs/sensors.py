"""What starts runs and watches them: thresholds and requests, failures, old runs.

One sensor asks the gateway for all tables at once and starts few runs: one table gets a
`flush` run, several share a `flush_all`. It starts none for a table that a run or another
worker is at; the gateway's lease stands behind that.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import dagster as dg

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.defs.choosing import (
    Memory,
    Observed,
    choose,
    observe,
    only_cleaning,
    recall,
)
from zombi_platform.defs.describing import describe_depth
from zombi_platform.defs.flush import DUE_TAG, flush_job, hot_buffer, hot_cleanup, merged_files
from zombi_platform.defs.flush_all import flush_all
from zombi_platform.defs.partitions import TABLES
from zombi_platform.defs.worker import run_url
from zombi_platform.errors import TransientError
from zombi_platform.progress import TableProgress
from zombi_platform.settings import Settings

POLL_SECS: Final = 5
"""The sensor daemon looks no more often."""

FAILURES_SECS: Final = 15
HOUSEKEEPING_SECS: Final = 600
RUNS_DELETED_MAX: Final = 100
TABLES_PER_RUN_MAX: Final = 100
RUNS_LOOKED_AT_MAX: Final = 500
TAG_CHARS_MAX: Final = 250
PARTITION_TAG: Final = "dagster/partition"
PRIORITY_TAG: Final = "dagster/priority"
FLUSH_PRIORITY: Final = "10"
"""Ahead of backfills in the queue."""

UNFINISHED: Final = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
FINISHED: Final = [
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]


def make_sensors(settings: Settings) -> list[dg.SensorDefinition]:
    @dg.sensor(
        jobs=[flush_job, flush_all],
        minimum_interval_seconds=POLL_SECS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Starts flushes that are due: by bytes, by age, or because one was asked "
        "for. Shows the depth of the hot buffer and adds new tables.",
    )
    def tables_due(
        context: dg.SensorEvaluationContext, gateway: dg.ResourceParam[PipelineClient]
    ) -> dg.SensorResult | dg.SkipReason:
        try:
            tables = gateway.tables(watcher="dagster")
        except TransientError as error:
            return dg.SkipReason(f"{error}; the next tick asks again")
        return evaluate(context.instance, Memory.read(context.cursor), tables, settings.url)

    @dg.run_failure_sensor(
        monitored_jobs=[flush_job, flush_all],
        minimum_interval_seconds=FAILURES_SECS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells the gateway of runs that died without a word, so that the table's "
        "status shows it.",
    )
    def failed_runs(
        context: dg.RunFailureSensorContext, gateway: dg.ResourceParam[PipelineClient]
    ) -> None:
        failed = [event.step_key for event in context.get_step_failure_events()]
        if failed != [merged_files.op.name]:  # which no flush waits for
            report_dead_run(gateway, context.dagster_run, context.failure_event.message, settings)

    @dg.sensor(
        minimum_interval_seconds=HOUSEKEEPING_SECS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Deletes finished runs past the newest {settings.dagster_runs_kept}.",
    )
    def old_runs(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        deleted = delete_old_runs(context.instance, settings.dagster_runs_kept)
        return dg.SkipReason(f"deleted {deleted} old runs")

    return [tables_due, failed_runs, old_runs]


def evaluate(
    instance: dg.DagsterInstance,
    memory: Memory,
    tables: Sequence[TableProgress],
    gateway_url: str,
) -> dg.SensorResult:
    """One tick: new tables, runs that are due, depths to show."""
    now_ms = time.time_ns() // 1_000_000
    failures = recall(memory, tables)
    known = set(instance.get_dynamic_partitions(TABLES.name or ""))
    new = [progress.table for progress in tables if progress.table not in known]
    shown = observe(memory, tables, now_ms)
    observed = {name: seen for name, seen in memory.observed.items() if name in known}
    observed |= {progress.table: Observed(now_ms, progress.events) for progress in shown}
    due = choose(tables, failures, busy_tables(instance), now_ms)
    return dg.SensorResult(
        run_requests=make_requests(due, gateway_url),
        cursor=Memory(failures, observed).write(),
        dynamic_partitions_requests=[TABLES.build_add_request(new)] if new else [],
        asset_events=[
            dg.AssetObservation(
                hot_buffer.key, partition=progress.table, metadata=describe_depth(progress)
            )
            for progress in shown
        ],
    )


def make_requests(due: Sequence[TableProgress], gateway_url: str) -> list[dg.RunRequest]:
    """One run for one table; several tables share one, which costs hardly more."""
    if len(due) == 1:
        (progress,) = due
        return [
            dg.RunRequest(
                job_name=flush_job.name,
                partition_key=progress.table,
                asset_selection=[hot_cleanup.key] if only_cleaning(progress) else None,
                tags={
                    DUE_TAG: "; ".join(progress.reasons)[:TAG_CHARS_MAX] or "litter in the lake",
                    "zombi/status": f"{gateway_url}/tables/{progress.table}/watermark",
                    PRIORITY_TAG: FLUSH_PRIORITY,
                },
            )
        ]
    names = [progress.table for progress in due]
    return [
        dg.RunRequest(
            job_name=flush_all.name,
            run_config={"ops": {"due_tables": {"config": {"tables": chunk}}}},
            tags={
                DUE_TAG: f"{len(chunk)} tables",
                "zombi/status": f"{gateway_url}/stats",
                PRIORITY_TAG: FLUSH_PRIORITY,
            },
        )
        for start in range(0, len(names), TABLES_PER_RUN_MAX)
        if (chunk := names[start : start + TABLES_PER_RUN_MAX])
    ]


def busy_tables(instance: dg.DagsterInstance) -> set[str]:
    """Tables that a run is at, or will be."""
    runs = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED), limit=RUNS_LOOKED_AT_MAX)
    return {table for run in runs for table in tables_of(run)}


def tables_of(run: dg.DagsterRun) -> list[str]:
    if run.job_name == flush_all.name:
        config: Any = run.run_config
        return list(config.get("ops", {}).get("due_tables", {}).get("config", {}).get("tables", []))
    key = run.tags.get(PARTITION_TAG, "")
    return [key] if key and "|" not in key else []


def report_dead_run(
    gateway: PipelineClient, run: dg.DagsterRun, message: str | None, settings: Settings
) -> None:
    told = {
        progress.table
        for progress in gateway.tables()
        if progress.failure is not None and progress.failure.run_id == run.run_id
    }
    for table in tables_of(run):
        if table not in told:
            gateway.report_failure(
                table,
                message or "the run failed without a word",
                "RUN_FAILED",
                "run",
                transient=True,
                run_id=run.run_id,
                url=run_url(settings.dagster_port, run.run_id),
            )


def delete_old_runs(instance: dg.DagsterInstance, kept: int) -> int:
    """Delete the oldest finished runs, some at a time; what they committed stays on the grid."""
    finished = dg.RunsFilter(statuses=FINISHED)
    surplus = instance.get_runs_count(finished) - kept
    if surplus <= 0:
        return 0
    records = instance.get_run_records(
        finished, limit=min(surplus, RUNS_DELETED_MAX), ascending=True
    )
    for record in records:
        instance.compute_log_manager.delete_logs(prefix=[record.dagster_run.run_id])
        instance.delete_run(record.dagster_run.run_id)
    return len(records)
