"""Many tables in one run, because a run costs more than a small flush.

Each table is a step of its own: one that fails stops no other and is executed again alone.
The assets of each table get the same materializations as from the `flush` job.
"""

from collections.abc import Iterator, Sequence

import dagster as dg
from pydantic import Field

from zombi_platform.cuts import CutState
from zombi_platform.defs.describing import (
    Metadata,
    describe_cleaned,
    describe_cut,
    describe_merged,
    describe_staged,
)
from zombi_platform.defs.flush import (
    DUE_TAG,
    describe_snapshot,
    hot_cleanup,
    hot_cut,
    is_commit_due,
    merged_files,
    reconcile,
    report_hours,
    rows_reconcile,
    snapshot,
    staged_files,
)
from zombi_platform.defs.worker import RETRIES, Worker
from zombi_platform.errors import LakeConflictError
from zombi_platform.pipeline import TableWork


class Tables(dg.Config):
    tables: list[str] = Field([], description="Which to flush; none named means all.")


@dg.op(
    out=dg.DynamicOut(str),
    description="The tables to flush, one step for each.",
    retry_policy=RETRIES,
)
def due_tables(config: Tables, worker: dg.ResourceParam[Worker]) -> Iterator[dg.DynamicOutput[str]]:
    names = config.tables or [known.table for known in worker.pipeline.gateway.tables()]
    for key, name in mapping_keys(names).items():
        yield dg.DynamicOutput(name, mapping_key=key)


def mapping_keys(names: Sequence[str]) -> dict[str, str]:
    """The tables by names for their steps, which take no hyphen and must differ all the same."""
    found: dict[str, str] = {}
    for number, name in enumerate(names):
        key = name.replace("-", "__")
        # No table's name begins like this.
        found[f"_{number}_{key}" if key in found else key] = name
    return found


@dg.op(description="Cut, stage, commit, verify, clean and merge one table.", retry_policy=RETRIES)
def flush_table(
    context: dg.OpExecutionContext, table: str, worker: dg.ResourceParam[Worker]
) -> None:
    def show(asset: dg.AssetsDefinition, metadata: Metadata) -> None:
        context.log_event(dg.AssetMaterialization(asset.key, partition=table, metadata=metadata))

    with worker.step(table, "cut") as work:
        cut = work.open_cut()
        if cut is not None:
            show(hot_cut, describe_cut(cut))
    with worker.step(table, "stage") as work:
        for cut in work.cuts():
            if cut.state is CutState.OPEN:
                show(staged_files, describe_staged(work.stage(cut), worker.pipeline.engine.name))
    if DUE_TAG not in context.run.tags or is_commit_due(worker, table):
        with worker.step(table, "commit") as work:
            committed = work.commit()
            if committed is not None:
                show(snapshot, describe_snapshot(worker, table, committed))
                report_hours(context.instance, table, committed)
            work.register()
    with worker.step(table, "clean") as work:
        check(context, worker, work)
        show(hot_cleanup, describe_cleaned(work.clean()))
    with worker.step(table, "merge", told=False) as work:
        merged = work.try_to_merge()
        if merged is not None:
            show(merged_files, describe_merged(merged, worker.pipeline.engine.name))
            work.register()
    worker.give_back(table)


def check(context: dg.OpExecutionContext, worker: Worker, work: TableWork) -> None:
    """The blocking check of the assets, in this run's words."""
    result = reconcile(worker, work.table, work.cuts())
    context.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=snapshot.key,
            check_name=rows_reconcile.check_key.name,
            passed=result.passed,
            metadata=result.metadata,
            description=result.description,
            blocking=True,
        )
    )
    if not result.passed:
        raise LakeConflictError(result.description or "rows do not reconcile")


@dg.job(description="Bring the events of many tables to Iceberg in one run.")
def flush_all() -> None:
    due_tables().map(flush_table)
