"""Staging one split: from the gateway's Arrow stream to recorded Parquet files.

The same function runs in a thread of the Arrow engine and in the Python of a Spark
executor, so it needs nothing but its arguments. Every path is announced to the gateway
before its file is begun: whatever dies, no file is left that nobody knows of. The first
report of a split is the one that counts; a worker that comes second takes its own files
back. Memory is bounded by the split.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow.parquet as pq

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import Split, StagedFile
from zombi_platform.engines.contract import SplitResult, StagingJob
from zombi_platform.engines.hour_files import HourRows, arrange, check_footer, write_parquet
from zombi_platform.errors import CorruptionError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.storage import Storage

INTENT_PATHS_MAX: Final = 500
"""Paths of one announcement; a split of wild timestamps has many thousand files."""
SMALL_FILES_MIN: Final = 32
"""A split of that many files has small ones."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A file that is about to be written."""

    path: str
    hour: HourRows


def stage_split(job: StagingJob, split: Split) -> SplitResult:
    """Write the files of a split and have them recorded in its cut."""
    started = time.monotonic()
    with PipelineClient(job.url, job.token) as client:
        with client.read_split(job.table, job.cut_id, split.number) as batches:
            hours = arrange(split, batches)
        failpoint("stage.read")
        files: list[StagedFile] = []
        for planned in _plan(job, split, hours):
            paths = [one.path for one in planned]
            client.intend(job.table, job.epoch, job.cut_id, split.number, paths)
            failpoint("stage.intended")
            files += _write_all(job, split, planned)
        failpoint("stage.written")
        report = client.report_split(job.table, job.epoch, job.cut_id, split.number, files)
        failpoint("stage.reported")
    # By path and not by the gateway's yes or no: when the answer to the first report was
    # lost, the second one is told no, and yet these are the recorded files.
    strays = {file.path for file in files} - {file.path for file in report.files}
    job.storage.delete(strays)
    return SplitResult(split.number, not strays, report.files, time.monotonic() - started)


def _plan(job: StagingJob, split: Split, hours: Sequence[HourRows]) -> Iterator[list[_Planned]]:
    """Names that no other attempt has, in portions that fit one announcement."""
    attempt = f"{job.epoch:x}-{secrets.token_hex(6)}"
    name = f"{job.cut_id:08d}-{split.number:05d}-{attempt}"
    for start in range(0, len(hours), INTENT_PATHS_MAX):
        portion = enumerate(hours[start : start + INTENT_PATHS_MAX], start)
        yield [
            _Planned(f"{_directory(job, hour)}/{name}-{number}.parquet", hour)
            for number, hour in portion
        ]


def _directory(job: StagingJob, hour: HourRows) -> str:
    return job.storage.hour_directory(job.table, hour.hour, hour.partition)


def _write_all(job: StagingJob, split: Split, planned: Sequence[_Planned]) -> list[StagedFile]:
    # Uploads wait for the network and small files for the disk; large files on a disk wait
    # for nothing, and writing them side by side would only take more memory.
    waiting = job.storage.is_s3 or len(planned) >= SMALL_FILES_MIN
    pool = ThreadPoolExecutor(job.uploads if waiting else 1, thread_name_prefix="upload")
    try:
        return list(pool.map(lambda one: _write(job, split.number, one), planned))
    finally:
        pool.shutdown(cancel_futures=True)


def _write(job: StagingJob, split: int, planned: _Planned) -> StagedFile:
    return write_file(job.storage, job.table, planned.path, split, planned.hour)


def write_file(storage: Storage, table: str, path: str, split: int, hour: HourRows) -> StagedFile:
    """Write a file, and read its footer back from the lake before it counts."""
    with storage.output(path) as sink:
        write_parquet(table, hour, sink)
        written = sink.tell()
    with storage.errors(path), storage.filesystem().open_input_file(storage.path(path)) as source:
        stored = source.size()
        check_footer(hour, pq.read_metadata(source))
    if stored != written:
        raise CorruptionError(f"{path} has {stored} bytes; {written} were written")
    first, last = hour.sequences
    return StagedFile(
        path=path,
        split=split,
        partition=hour.partition,
        hour=hour.hour,
        events=hour.events,
        bytes=stored,
        first=first,
        last=last,
    )
