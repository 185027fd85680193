"""What both engines must do alike when they merge small files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.engines.staging import HOUR_MS, TABLE, Staging, stage
from zombi_platform.engines import Engine, MergingJob
from zombi_platform.errors import CorruptionError, FencedError
from zombi_platform.lake.small_files import LiveFile, MergedFile, SmallFiles, base_of

BASE = 4711


def small_files(staging: Staging, engine: Engine) -> tuple[MergingJob, list[SmallFiles]]:
    """Files of three hours and three partitions, two or three of each, and who may merge them."""
    staging.send_mixed()
    cut, job = staging.open()
    stage(engine, job, cut.splits)
    groups: dict[tuple[int, int], list[LiveFile]] = {}
    for file in staging.cut().files:
        live = LiveFile(file.path, file.partition, file.hour, file.events, file.bytes)
        groups.setdefault((file.partition, file.hour), []).append(live)
    numbered = enumerate(sorted(groups.items()))
    merging = MergingJob(job.url, None, TABLE, job.epoch, BASE, staging.storage, 2**20)
    return merging, [SmallFiles(n, *place, tuple(files)) for n, (place, files) in numbered]


def merge(engine: Engine, job: MergingJob, groups: list[SmallFiles]) -> list[MergedFile]:
    told: list[MergedFile] = []
    engine.merge(job, groups, told.append)
    return told


def test_a_merged_file_holds_the_events_of_all_in_order(engine: Engine, staging: Staging) -> None:
    job, groups = small_files(staging, engine)
    assert min(len(group.files) for group in groups) > 1
    merged = merge(engine, job, groups)
    assert {one.file.split for one in merged} == {group.number for group in groups}
    by_number = {one.file.split: one for one in merged}
    found = []
    for group in groups:
        one = by_number[group.number]
        assert one.replaced == group.files
        rows = staging.rows(one.file)
        found += rows
        assert rows == sorted(rows, key=lambda row: (row[2], row[1]))
        sequences = [row[1] for row in rows]
        assert (len(rows), min(sequences), max(sequences)) == (
            one.file.events,
            one.file.first,
            one.file.last,
        )
        assert {(row[0], row[2] // HOUR_MS) for row in rows} == {(group.partition, group.hour)}
        place, _, _ = one.file.path.rpartition("/")
        assert place == staging.storage.hour_directory(TABLE, group.hour, group.partition)
        assert base_of(one.file.path) == BASE
    assert sorted(found) == sorted(staging.acked)
    known = {file.path for group in groups for file in group.files}
    assert staging.files_on_disk() == known | {one.file.path for one in merged}


def test_no_more_is_merged_than_fits_into_one_file(engine: Engine, staging: Staging) -> None:
    job, groups = small_files(staging, engine)
    (group, *_) = groups
    assert len(group.files) == 3
    footers = [pq.read_metadata(staging.storage.path(file.path)) for file in group.files[:2]]
    two = sum(footer.row_group(0).total_byte_size for footer in footers)
    (one,) = merge(engine, dataclasses.replace(job, bytes_max=two), [group])
    assert one.replaced == group.files[:2]
    assert one.file.events == sum(file.events for file in group.files[:2])
    assert merge(engine, dataclasses.replace(job, bytes_max=1), [group]) == []


def test_a_stale_worker_merges_nothing(engine: Engine, staging: Staging) -> None:
    job, groups = small_files(staging, engine)
    before = staging.files_on_disk()
    with pytest.raises(FencedError):
        merge(engine, dataclasses.replace(job, epoch=job.epoch + 1), groups)
    assert staging.files_on_disk() == before


def test_a_file_that_is_gone_is_named(engine: Engine, staging: Staging) -> None:
    job, groups = small_files(staging, engine)
    gone = groups[0].files[0].path
    Path(staging.storage.path(gone)).unlink()
    with pytest.raises(CorruptionError, match="gone from the lake"):
        merge(engine, job, groups[:1])


def test_a_torn_file_is_named_and_the_others_are_merged(engine: Engine, staging: Staging) -> None:
    job, groups = small_files(staging, engine)
    torn = Path(staging.storage.path(groups[0].files[0].path))
    torn.write_bytes(torn.read_bytes()[:-20])
    told: list[MergedFile] = []
    with pytest.raises(CorruptionError, match="cannot be read"):
        engine.merge(job, groups, told.append)
    assert {one.file.split for one in told} == {group.number for group in groups[1:]}


@pytest.mark.parametrize("wrong", ["the same twice", "another hour"])
def test_events_that_do_not_belong_together_are_not_merged(
    engine: Engine, staging: Staging, wrong: str
) -> None:
    job, groups = small_files(staging, engine)
    group = groups[0]
    before = staging.files_on_disk()
    if wrong == "the same twice":
        group = dataclasses.replace(group, files=(group.files[0], group.files[0]))
    else:
        group = dataclasses.replace(group, hour=group.hour + 1)
    with pytest.raises(CorruptionError, match="different events"):
        merge(engine, job, [group])
    assert staging.files_on_disk() == before
