"""What assets work with: the gateway, the lake, an engine, and a worker that holds leases.

Made once for a run, closed with it. Settings come from the entry point; nothing here reads
the environment.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import dagster as dg

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.defs.worker import Worker
from zombi_platform.engines import Engine, choose_engine, open_engine
from zombi_platform.lake.lake import Lake
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings


def make_resources(settings: Settings) -> Mapping[str, Any]:
    @dg.resource(description=f"The gateway at {settings.url}.")
    def gateway(_: dg.InitResourceContext) -> Iterator[PipelineClient]:
        with PipelineClient(settings.url, settings.token) as client:
            yield client

    @dg.resource(description=f"Iceberg tables in a {settings.catalog} catalog.")
    def lake(_: dg.InitResourceContext) -> Lake:
        return Lake(settings)

    @dg.resource(
        description="Moves events from the hot buffer to Iceberg, one table at a time.",
        required_resource_keys={"gateway", "lake", "engine"},
    )
    def worker(context: dg.InitResourceContext) -> Iterator[Worker]:
        parts: Any = context.resources
        pipeline = Pipeline(settings, parts.gateway, parts.lake, parts.engine)
        run = context.run
        run_id = run.run_id if run is not None else "ephemeral"
        root_run_id = (run.root_run_id if run is not None else None) or run_id
        opened = Worker(pipeline, run_id, root_run_id)
        try:
            yield opened
        finally:
            opened.close()

    return {"gateway": gateway, "lake": lake, "worker": worker, **_engine(settings)}


def _engine(settings: Settings) -> dict[str, Any]:
    """What writes Parquet: Spark, with its session as a resource of its own, or Arrow."""
    name, reason = choose_engine(settings)
    description = f"Writes Parquet with {name}: {reason}."
    if name == "arrow":

        @dg.resource(description=description)
        def arrow(_: dg.InitResourceContext) -> Iterator[Engine]:
            with closing(open_engine(settings)) as engine:
                yield engine

        return {"engine": arrow}
    # Here and not above: without Spark nothing of it is imported.
    from zombi_platform.defs.spark import SparkResource
    from zombi_platform.engines.spark.engine import SparkEngine

    @dg.resource(description=description, required_resource_keys={"spark"})
    def spark(context: dg.InitResourceContext) -> Iterator[Engine]:
        parts: Any = context.resources
        with closing(SparkEngine(parts.spark.connection)) as engine:
            yield engine

    return {"engine": spark, "spark": SparkResource.of(settings)}
