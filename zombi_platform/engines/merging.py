"""Merging small files: from files of one hour and partition to one new file.

The same function runs in a thread of the Arrow engine and in the Python of a Spark executor.
The path is announced to the gateway before the file is begun, and its name tells on top of
which snapshot it may be committed. Memory is bounded by the limit of one file's events.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.engines.contract import MergingJob
from zombi_platform.engines.hour_files import HOUR_MS, HourRows
from zombi_platform.engines.staging import write_file
from zombi_platform.errors import CorruptionError
from zombi_platform.events import COLUMNS
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.small_files import LiveFile, MergedFile, SmallFiles, merge_name
from zombi_platform.lake.storage import Storage


def merge_files(job: MergingJob, group: SmallFiles) -> MergedFile | None:
    """Write the events of small files into one; None if two of them are too much for one."""
    files, tables = _read(job, group)
    if len(files) < 2:
        return None
    rows = _arrange(group, files, tables)
    name = f"{merge_name(job.base)}{job.epoch:x}-{secrets.token_hex(6)}.parquet"
    path = f"{job.storage.hour_directory(job.table, group.hour, group.partition)}/{name}"
    with PipelineClient(job.url, job.token) as client:
        client.add_tombstones(job.table, job.epoch, [path], [])
    failpoint("merge.announced")
    merged = MergedFile(write_file(job.storage, job.table, path, group.number, rows), tuple(files))
    failpoint("merge.written")
    return merged


def _read(job: MergingJob, group: SmallFiles) -> tuple[list[LiveFile], list[pa.Table]]:
    """The files, one after the other, as far as their events fit into one."""
    files: list[LiveFile] = []
    tables: list[pa.Table] = []
    room = job.bytes_max
    with ThreadPoolExecutor(job.downloads, thread_name_prefix="download") as pool:
        contents = list(pool.map(partial(_content, job.storage), group.files))
    for file, content in zip(group.files, contents, strict=True):
        try:
            source = pq.ParquetFile(pa.BufferReader(content))
            groups = range(source.metadata.num_row_groups)
            room -= sum(source.metadata.row_group(place).total_byte_size for place in groups)
            if room < 0:
                break
            rows = source.read(COLUMNS.names)
            columns = [rows[field.name].cast(field.type) for field in COLUMNS]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise CorruptionError(
                f"{file.path} is in the table and cannot be read: {error}"
            ) from error
        files.append(file)
        tables.append(pa.Table.from_arrays(columns, schema=COLUMNS))
    return files, tables


def _content(storage: Storage, file: LiveFile) -> bytes:
    try:
        return storage.read(file.path)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{file.path} is in the table and gone from the lake: somebody deleted it"
        ) from error


def _arrange(group: SmallFiles, files: list[LiveFile], tables: list[pa.Table]) -> HourRows:
    """The rows in the order of a file; raises unless they are what the files should hold."""
    rows = pa.concat_tables(tables).combine_chunks()
    sequences, stamps = rows["sequence"].to_numpy(), rows["timestamp_ms"].to_numpy()
    events = sum(file.events for file in files)
    if (
        rows.num_rows != events
        or len(np.unique(sequences)) != events
        or not (stamps // HOUR_MS == group.hour).all()
        or not (rows["partition"].to_numpy() == group.partition).all()
    ):
        raise CorruptionError(
            f"files of partition {group.partition}, hour {group.hour} do not hold {events} "
            f"different events of that hour: {', '.join(file.path for file in files)}"
        )
    order = np.lexsort((sequences, stamps))
    in_order = bool((np.diff(order) == 1).all())
    chosen = slice(0, events) if in_order else order
    return HourRows(group.partition, group.hour, rows, chosen, events)
