"""What both engines must do alike. Files are judged by DuckDB against what was acked."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.engines.staging import HOUR_MS, NOON, TABLE, Staging, stage
from tests.s3 import ObjectServer
from zombi_platform.cuts import CutState
from zombi_platform.engines import Engine
from zombi_platform.errors import (
    FencedError,
    GatewayUnreachableError,
    LakeUnavailableError,
    NotFoundError,
)
from zombi_platform.events import TIMESTAMP_MS_MAX
from zombi_platform.lake.storage import Storage, local_location


def test_every_acked_event_is_in_one_file_of_its_hour(engine: Engine, staging: Staging) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    assert len(cut.splits) > 3
    told = stage(engine, job, cut.splits)
    assert sorted(result.split for result in told) == [split.number for split in cut.splits]
    assert all(result.kept for result in told)

    staged = staging.cut()
    assert staged.state is CutState.STAGED
    assert Counter(staged.files) == Counter(file for result in told for file in result.files)
    found = []
    for file in staged.files:
        rows = staging.rows(file)
        found += rows
        order = [(stamp, sequence) for _, sequence, stamp, *_ in rows]
        assert order == sorted(order)
        assert {(row[0], row[2] // HOUR_MS) for row in rows} == {(file.partition, file.hour)}
        sequences = [row[1] for row in rows]
        assert (len(rows), min(sequences), max(sequences)) == (file.events, file.first, file.last)
        assert file.path.rpartition("/")[0] == staging.storage.hour_directory(
            TABLE, file.hour, file.partition
        )
    assert sorted(found) == sorted(staging.acked)
    assert staging.files_on_disk() == {file.path for file in staged.files}


def test_events_of_any_time_are_staged(engine: Engine, staging: Staging) -> None:
    year_ms = 365 * 24 * HOUR_MS
    staging.send(0, [0, TIMESTAMP_MS_MAX, NOON, NOON - year_ms, NOON + year_ms, NOON - 1])
    cut, job = staging.open()
    stage(engine, job, cut.splits)
    files = staging.cut().files
    assert len(files) == 6
    assert sorted(row for file in files for row in staging.rows(file)) == sorted(staging.acked)


@pytest.mark.parametrize(
    "store", ["moto", pytest.param("versitygw", marks=pytest.mark.integration)]
)
@pytest.mark.usefixtures("credentials")
def test_files_go_to_an_object_store(
    engine: Engine, staging: Staging, store: str, request: pytest.FixtureRequest
) -> None:
    server: ObjectServer = request.getfixturevalue(store)
    storage = Storage(f"s3://{server.bucket()}/lake", endpoint=server.endpoint)
    staging.send_mixed()
    cut, job = staging.open()
    job = dataclasses.replace(job, storage=storage, uploads=4)
    stage(engine, job, cut.splits[:1])
    stage(engine, job, cut.splits)
    files = staging.cut().files
    assert {found.location for found in storage.files(f"{storage.warehouse}/")} == {
        file.path for file in files
    }
    columns = ["partition", "sequence", "timestamp_ms", "payload", "idempotency_key"]
    rows = [
        tuple(row[name] for name in columns)
        for file in files
        for row in pq.read_table(
            storage.path(file.path), columns=columns, filesystem=storage.filesystem()
        ).to_pylist()
    ]
    assert sorted(rows) == sorted(staging.acked)


def test_the_second_stager_of_a_split_takes_its_files_back(
    engine: Engine, staging: Staging
) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    first = stage(engine, job, cut.splits[:2])
    second = stage(engine, job, cut.splits)
    kept = {result.split: result for result in second}
    for result in first:
        assert not kept[result.split].kept
        assert kept[result.split].files == result.files
    assert [result.kept for result in second].count(True) == len(cut.splits) - 2
    assert staging.files_on_disk() == {file.path for file in staging.cut().files}


def test_a_stale_worker_is_refused_and_leaves_nothing(engine: Engine, staging: Staging) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    stale = dataclasses.replace(job, epoch=job.epoch + 1)
    with pytest.raises(FencedError):
        stage(engine, stale, cut.splits)
    assert staging.cut().missing == cut.splits
    assert staging.files_on_disk() == set()


def test_a_disk_that_refuses_is_told_and_the_rest_is_staged_later(
    engine: Engine, staging: Staging, tmp_path: Path
) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    (tmp_path / "a file").write_bytes(b"")
    storage = dataclasses.replace(job.storage, warehouse=local_location(tmp_path / "a file"))
    with pytest.raises(LakeUnavailableError, match="a file"):
        stage(engine, dataclasses.replace(job, storage=storage), cut.splits)
    assert staging.cut().missing == cut.splits
    stage(engine, job, staging.cut().missing)
    assert staging.cut().state is CutState.STAGED


def test_a_gateway_that_is_gone_is_a_transient_error(engine: Engine, staging: Staging) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    staging.gateway.kill()
    with pytest.raises(GatewayUnreachableError):
        stage(engine, job, cut.splits)
    assert staging.files_on_disk() == set()


def test_a_split_that_is_not_there_is_named(engine: Engine, staging: Staging) -> None:
    staging.send_mixed()
    cut, job = staging.open()
    with pytest.raises(NotFoundError):
        stage(engine, dataclasses.replace(job, cut_id=cut.id + 1), cut.splits)


def test_an_error_of_the_listener_stops_staging(engine: Engine, staging: Staging) -> None:
    staging.send_mixed()
    cut, job = staging.open()

    def refuse(_: object) -> None:
        raise FencedError("another worker has taken over")

    with pytest.raises(FencedError, match="taken over"):
        engine.stage(job, cut.splits, refuse)


def test_engines_are_ready(engine: Engine) -> None:
    engine.ready()
