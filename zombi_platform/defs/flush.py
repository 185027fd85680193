"""The flush of one table, step by step: cut, stage, commit, check, clean, merge.

Every step asks the gateway how far the table has come and does what is missing, so a run
may be executed again from any of them. Runs that the sensor starts commit only what is due;
a run that a person starts commits all there is.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from zombi_platform.cuts import Cut, CutState
from zombi_platform.defs.describing import (
    Metadata,
    describe_cleaned,
    describe_commit,
    describe_cut,
    describe_merged,
    describe_staged,
    sum_hours,
)
from zombi_platform.defs.partitions import TABLES, is_shown, table_hour
from zombi_platform.defs.worker import RETRIES, Worker
from zombi_platform.errors import LakeConflictError
from zombi_platform.lake.state import Verified
from zombi_platform.pipeline import Committed

GROUP: Final = "flush"
OWNERS: Final = ["team:platform"]
EVENTS: Final = dg.AssetKey("events")
DUE_TAG: Final = "zombi/due"
"""On runs of the sensor: why it started them."""

HOURS_REPORTED_MAX: Final = 1000
"""Hours of one commit that appear on the grid; each costs some milliseconds."""

hot_buffer = dg.AssetSpec(
    "hot_buffer",
    description="Events that were acked and are not deleted yet. Depth, lag and age of the "
    "oldest event appear as observations, without a run.",
    group_name=GROUP,
    owners=OWNERS,
    kinds={"rocksdb"},
    partitions_def=TABLES,
)


@dg.asset(
    deps=[hot_buffer],
    description="The range of sequences per partition that is flushed together, fixed by the "
    "gateway. Asking again gives the same cut until it is staged.",
    kinds={"rocksdb"},
    partitions_def=TABLES,
    group_name=GROUP,
    owners=OWNERS,
    retry_policy=RETRIES,
)
def hot_cut(
    context: dg.AssetExecutionContext, worker: dg.ResourceParam[Worker]
) -> Iterator[dg.MaterializeResult[None]]:
    table = context.partition_key
    with worker.step(table, "cut") as work:
        cut = work.open_cut()
    metadata: Metadata = describe_cut(cut) if cut else {"events": 0}
    yield dg.MaterializeResult(metadata={**metadata, "status": status_link(worker, table)})


@dg.asset(
    deps=[hot_cut],
    description="Parquet files of the cut, one or more per hour and partition, sorted by time. "
    "They are in no snapshot yet. Splits that were staged before a retry are kept.",
    kinds={"parquet"},
    partitions_def=TABLES,
    group_name=GROUP,
    owners=OWNERS,
    retry_policy=RETRIES,
)
def staged_files(
    context: dg.AssetExecutionContext, worker: dg.ResourceParam[Worker]
) -> Iterator[dg.MaterializeResult[None]]:
    engine = worker.pipeline.engine.name
    with worker.step(context.partition_key, "stage") as work:
        open_cuts = [cut for cut in work.cuts() if cut.state is CutState.OPEN]
        staged = [work.stage(cut) for cut in open_cuts]
    nothing: Metadata = {"files": 0, "engine": engine}
    metadata = describe_staged(staged[-1], engine) if staged else nothing
    yield dg.MaterializeResult(metadata=metadata)


@dg.asset(
    deps=[staged_files],
    description="The Iceberg snapshot that holds all staged cuts, committed behind a fence: an "
    "event is in the table once, whoever retries. The gateway looks it up in the catalog itself.",
    kinds={"iceberg"},
    output_required=False,
    partitions_def=TABLES,
    group_name=GROUP,
    owners=OWNERS,
    retry_policy=RETRIES,
)
def snapshot(
    context: dg.AssetExecutionContext, worker: dg.ResourceParam[Worker]
) -> Iterator[dg.MaterializeResult[None]]:
    table = context.partition_key
    with worker.step(table, "commit") as work:
        if DUE_TAG in context.run.tags and not is_commit_due(worker, table):
            context.log.info("the thresholds for a snapshot are not reached yet")
            return
        committed = work.commit()
        work.register()
    yield dg.MaterializeResult(metadata=describe_snapshot(worker, table, committed))
    if committed is not None:
        report_hours(context.instance, table, committed)


@dg.asset_check(
    asset=snapshot,
    description="The lake holds the events of every cut that is committed and not cleaned, "
    "each once. Nothing is deleted from the hot buffer while it does not.",
    blocking=True,
    retry_policy=RETRIES,
)
def rows_reconcile(
    context: dg.AssetCheckExecutionContext, worker: dg.ResourceParam[Worker]
) -> dg.AssetCheckResult:
    table = context.partition_key
    with worker.step(table, "verify") as work:
        return reconcile(worker, table, work.cuts())


@dg.asset(
    deps=[snapshot],
    description="Committed events deleted from the hot buffer after its retention, and files "
    "in the lake that nothing refers to after their grace period.",
    kinds={"rocksdb"},
    partitions_def=TABLES,
    group_name=GROUP,
    owners=OWNERS,
    retry_policy=RETRIES,
)
def hot_cleanup(
    context: dg.AssetExecutionContext, worker: dg.ResourceParam[Worker]
) -> Iterator[dg.MaterializeResult[None]]:
    with worker.step(context.partition_key, "clean") as work:
        cleaned = work.clean()
    yield dg.MaterializeResult(metadata=describe_cleaned(cleaned))


@dg.asset(
    deps=[hot_cleanup],
    description="Small files of one hour and partition, made into one when ten of a size have "
    "come together. The events stay the same; a failure here holds no flush up.",
    kinds={"iceberg", "parquet"},
    partitions_def=TABLES,
    group_name=GROUP,
    owners=OWNERS,
    # The next flush tries again anyway, and this one should be over by then.
    retry_policy=dg.RetryPolicy(max_retries=1, delay=2),
)
def merged_files(
    context: dg.AssetExecutionContext, worker: dg.ResourceParam[Worker]
) -> Iterator[dg.MaterializeResult[None]]:
    with worker.step(context.partition_key, "merge", told=False) as work:
        merged = work.merge()
        if merged is not None:
            work.register()
    yield dg.MaterializeResult(metadata=describe_merged(merged, worker.pipeline.engine.name))


flush_job = dg.define_asset_job(
    "flush",
    selection=dg.AssetSelection.assets(hot_cut, staged_files, snapshot, hot_cleanup, merged_files),
    description="Bring one table's acked events to Iceberg and clean up behind them.",
)


def status_link(worker: Worker, table: str) -> dg.UrlMetadataValue:
    """Where the gateway tells how far the table has come."""
    return dg.MetadataValue.url(f"{worker.pipeline.settings.url}/tables/{table}/watermark")


def is_commit_due(worker: Worker, table: str) -> bool:
    return worker.progress(table).commit_due


def describe_snapshot(worker: Worker, table: str, committed: Committed | None) -> Metadata:
    if committed is None:
        return {"events": 0, "files": 0}
    return describe_commit(committed, worker.pipeline.lake.require_state(table))


def reconcile(worker: Worker, table: str, cuts: Sequence[Cut]) -> dg.AssetCheckResult:
    """Look the committed cuts up in the catalog once more, from here."""
    committed = [cut for cut in cuts if cut.state is CutState.COMMITTED]
    events = sum(cut.events for cut in committed)
    try:
        found: Verified = worker.pipeline.lake.verify(table, committed)
    except LakeConflictError as error:
        return dg.AssetCheckResult(
            passed=False, description=str(error), metadata={"code": error.code, "events": events}
        )
    return dg.AssetCheckResult(
        passed=True, metadata={"cuts": len(found.snapshots), "events": events}
    )


def report_hours(instance: dg.DagsterInstance, table: str, committed: Committed) -> None:
    """Show on the grid what each hour gained, without a run."""
    now = datetime.now(UTC)
    files = [file for cut in committed.cuts for file in cut.files]
    hours = [hour for hour in sum_hours(files) if is_shown(hour.hour, now)]
    for hour in hours[-HOURS_REPORTED_MAX:]:
        metadata: Metadata = {
            "added_events": hour.events,
            "added_bytes": hour.bytes,
            "added_files": hour.files,
            "snapshot_id": str(committed.commit.snapshot_id),
        }
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                EVENTS, partition=table_hour(table, hour.hour), metadata=metadata
            )
        )
