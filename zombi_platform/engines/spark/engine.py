"""The Spark engine: one task a split or merge, on a Spark Connect server.

`spark.range(0, n, 1, n)` gives exactly one row to each task, and `mapInArrow` runs
`stage_split` or `merge_files` on it in the executor's Python, so nothing is shuffled and no
event crosses the JVM. Results are told of in the order of the job; when a task fails for
good, what other tasks recorded stays so, and a repetition stages only the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.sql.connect.session import SparkSession

from zombi_platform.cuts import Split
from zombi_platform.engines.contract import MergingJob, SplitResult, StagingJob
from zombi_platform.engines.merging import merge_files
from zombi_platform.engines.spark.session import Connection, spark_errors
from zombi_platform.engines.spark.task import ROW_SCHEMA, decode_outcome, work_rows
from zombi_platform.engines.staging import stage_split
from zombi_platform.errors import ZombiError
from zombi_platform.lake.small_files import MergedFile, SmallFiles
from zombi_platform.settings import Settings

TASKS_PER_JOB_MAX: Final = 1000

T = TypeVar("T")
U = TypeVar("U")


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
        for start in range(0, len(splits), TASKS_PER_JOB_MAX):
            portion = splits[start : start + TASKS_PER_JOB_MAX]
            self._run_job(partial(stage_split, job), portion, SplitResult, on_split)

    def merge(
        self,
        job: MergingJob,
        groups: Sequence[SmallFiles],
        on_merged: Callable[[MergedFile], None],
    ) -> None:
        self._run_job(partial(merge_files, job), groups, MergedFile, on_merged)

    def close(self) -> None:
        self._connection.close()

    def _run_job(
        self,
        work: Callable[[T], U | None],
        items: Sequence[T],
        result: type[U],
        on_result: Callable[[U], None],
    ) -> None:
        """One task an item; an item whose work comes to None is not told of."""
        places = dict(enumerate(items))

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return work_rows(work, places, batches)

        failure: ZombiError | None = None
        session = self._connection.session()
        with spark_errors(self._connection.remote), _interrupted_on_error(session):
            tasks = session.range(0, len(items), 1, len(items)).mapInArrow(run, ROW_SCHEMA)
            for row in tasks.toLocalIterator():
                outcome = decode_outcome(bytes(row.outcome), result)
                if isinstance(outcome, ZombiError):
                    failure = failure or outcome
                elif outcome is not None:
                    on_result(outcome)
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
