"""A warm worker for the bench: flushes each table named on its input, one answer a line."""

import json
import os
import sys
from functools import partial

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import CutState
from zombi_platform.engines import Engine, StagingJob, open_engine
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


def main() -> None:
    settings = Settings.from_env(os.environ)
    engine, lake = open_engine(settings), Lake(settings)
    engine.ready()
    with PipelineClient(settings.url, settings.token) as gateway:
        answer({"ready": True})
        for line in sys.stdin:
            answer(flush(settings, gateway, engine, lake, line.strip()))
    engine.close()


def flush(
    settings: Settings, gateway: PipelineClient, engine: Engine, lake: Lake, table: str
) -> dict[str, object]:
    epoch = gateway.lease(table, "bench").epoch
    lake.ensure_table(table)
    cut = gateway.open_cut(table, epoch)
    assert cut is not None
    job = StagingJob.of(settings, lake.storage, cut, epoch)
    engine.stage(job, cut.splits, lambda _: None)
    staged = [cut for cut in gateway.cuts(table) if cut.state is CutState.STAGED]
    lake.commit(table, staged, before_write=partial(gateway.add_tombstones, table, epoch))
    gateway.report_commit(table, epoch, [cut.id for cut in staged])
    return {"events": cut.events, "files": len(staged[0].files)}


def answer(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
