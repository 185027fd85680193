"""The Spark engine: one task a split, on a Spark Connect server.

`spark.range(0, n, 1, n)` gives exactly one row to each task, and `mapInArrow` runs
`stage_split` on it in the executor's Python, so nothing is shuffled and no event crosses
the JVM. Splits are told of in the order of the job; when a task fails for good, those
recorded by other tasks stay so, and a repetition stages only the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from pyspark.sql.connect.session import SparkSession

from zombi_platform.cuts import Split
from zombi_platform.engines.contract import SplitResult, StagingJob
from zombi_platform.engines.spark.session import Connection, spark_errors
from zombi_platform.engines.spark.task import ROW_SCHEMA, decode_outcome, stage_rows
from zombi_platform.errors import ZombiError
from zombi_platform.settings import Settings

SPLITS_PER_JOB_MAX: Final = 1000


class SparkEngine:
    name = "spark"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def from_settings(cls, settings: Settings) -> SparkEngine:
        return cls(Connection.from_settings(settings))

    def ready(self) -> None:
        self._connection.session()

    def stage(
        self, job: StagingJob, splits: Sequence[Split], on_split: Callable[[SplitResult], None]
    ) -> None:
        for start in range(0, len(splits), SPLITS_PER_JOB_MAX):
            self._run_job(job, splits[start : start + SPLITS_PER_JOB_MAX], on_split)

    def close(self) -> None:
        self._connection.close()

    def _run_job(
        self, job: StagingJob, splits: Sequence[Split], on_split: Callable[[SplitResult], None]
    ) -> None:
        places = dict(enumerate(splits))

        def stage(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return stage_rows(job, places, batches)

        failure: ZombiError | None = None
        session = self._connection.session()
        with spark_errors(self._connection.remote), _interrupted_on_error(session):
            tasks = session.range(0, len(splits), 1, len(splits)).mapInArrow(stage, ROW_SCHEMA)
            for row in tasks.toLocalIterator():
                outcome = decode_outcome(bytes(row.outcome))
                if outcome.result is not None:
                    on_split(outcome.result)
                elif outcome.failure is not None:
                    failure = failure or outcome.failure.to_error()
        if failure is not None:
            raise failure


@contextmanager
def _interrupted_on_error(session: SparkSession) -> Iterator[None]:
    """Nobody waits for the job of a worker that was stopped, so its tasks stop as well."""
    tag = f"zombi-{uuid.uuid4().hex}"
    session.addTag(tag)
    try:
        yield
    except BaseException:
        session.interruptTag(tag)
        raise
    finally:
        session.removeTag(tag)
