"""Small staged cuts for tests of the lake, written as an engine writes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

import pyarrow as pa
import pyarrow.parquet as pq

from zombi_platform.cuts import Cut, CutState, Range, Split, StagedFile
from zombi_platform.lake.columns import FILE_SCHEMA
from zombi_platform.lake.replacement import MergePlan
from zombi_platform.lake.small_files import MergedFile, merge_name
from zombi_platform.lake.storage import Storage

HOUR = 497_000
"""2026-09-12T08:00Z"""


def stage(storage: Storage, table: str, cut_id: int, *ranges: Range, hour: int = HOUR) -> Cut:
    """A staged cut with one file for each range, all in one hour."""
    files = tuple(
        stage_file(storage, table, f"{cut_id:08d}-{number:05d}", number, part, hour)
        for number, part in enumerate(ranges)
    )
    return Cut(
        table=table,
        id=cut_id,
        state=CutState.STAGED,
        created_ms=0,
        oldest_ms=0,
        ranges=ranges,
        splits=tuple(Split(number, (part,), 1) for number, part in enumerate(ranges)),
        files=files,
        staged_splits=tuple(range(len(ranges))),
    )


def stage_file(
    storage: Storage, table: str, name: str, split: int, part: Range, hour: int
) -> StagedFile:
    location = f"{storage.hour_directory(table, hour, part.partition)}/{name}.parquet"
    return _write(storage, location, split, events(table, part, hour), part.partition, hour)


def merge(storage: Storage, plan: MergePlan) -> list[MergedFile]:
    """What an engine makes of a plan's groups."""
    merged = []
    for group in plan.groups:
        rows = pa.concat_tables(
            pq.read_table(storage.path(file.path), filesystem=storage.filesystem())
            for file in group.files
        ).cast(FILE_SCHEMA)
        directory = storage.hour_directory(plan.table, group.hour, group.partition)
        location = f"{directory}/{merge_name(plan.base)}{group.number}.parquet"
        file = _write(storage, location, group.number, rows, group.partition, group.hour)
        merged.append(MergedFile(file, group.files))
    return merged


def _write(
    storage: Storage, location: str, split: int, rows: pa.Table, partition: int, hour: int
) -> StagedFile:
    with storage.output(location) as sink:
        pq.write_table(rows, sink, compression="zstd")
    sequences = rows["sequence"].to_pylist()
    return StagedFile(
        path=location,
        split=split,
        partition=partition,
        hour=hour,
        events=len(sequences),
        bytes=storage.filesystem().get_file_info(storage.path(location)).size,
        first=min(sequences),
        last=max(sequences),
    )


def events(table: str, part: Range, hour: int = HOUR) -> pa.Table:
    sequences = range(part.first, part.last + 1)
    count = len(sequences)
    columns: dict[str, Sequence[object]] = {
        "sequence": list(sequences),
        "topic": [table] * count,
        "partition": [part.partition] * count,
        "payload": [b"event %d" % sequence for sequence in sequences],
        "timestamp_ms": [hour * 3_600_000 + n for n in range(count)],
        "idempotency_key": [None] * count,
        "event_date": [date(1970, 1, 1) + timedelta(days=hour // 24)] * count,
        "event_hour": [hour % 24] * count,
        "headers": [None] * count,
    }
    return pa.table(columns, schema=FILE_SCHEMA)


class Tombstones:
    """What a commit announced; stands in for the gateway's record of it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.prefixes: list[str] = []

    def __call__(self, paths: Sequence[str], prefixes: Sequence[str]) -> None:
        self.paths += paths
        self.prefixes += prefixes
