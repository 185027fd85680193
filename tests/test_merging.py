"""Many small flushes leave few files, and every event where a reader finds it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway import Gateway, running
from tests.oracle import rows_in_lake
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings

AT = 3
FLUSHES = 20
PARTITIONS = 2


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with running(tmp_path, merge_files_at=str(AT)) as gateway:
        yield gateway


@pytest.fixture
def pipeline(gateway: Gateway, tmp_path: Path) -> Iterator[Pipeline]:
    settings = Settings(data_dir=tmp_path, url=gateway.url, engine="arrow", merge_files_at=AT)
    with Pipeline.opened(settings) as pipeline:
        yield pipeline


def send(gateway: Gateway, first: int) -> None:
    records = [
        {
            "payload": f"event {number}",
            "partition": number % PARTITIONS,
            "timestamp_ms": 1_700_000_000_000 - number,
            "headers": {"number": str(number)} if number % 3 else None,
            "idempotency_key": f"key-{number}" if number % 2 else None,
        }
        for number in range(first, first + 10)
    ]
    httpx.post(f"{gateway.url}/tables/t/bulk", json={"records": records}).raise_for_status()


def read(pipeline: Pipeline) -> list[dict[str, object]]:
    found = pipeline.lake.load("t")
    assert found is not None
    rows: list[dict[str, object]] = found[0].scan().to_arrow().to_pylist()
    return rows


def files(pipeline: Pipeline) -> int:
    found = pipeline.lake.load("t")
    assert found is not None
    return len(list(found[0].scan().plan_files()))


def test_many_flushes_leave_few_files(gateway: Gateway, pipeline: Pipeline) -> None:
    merged = []
    for n in range(FLUSHES):
        send(gateway, 10 * n)
        merged.append(pipeline.flush("t").merged_files)
    assert sum(1 for count in merged if count) >= FLUSHES // AT
    # Fewer than three of each size, of which there are two or three.
    assert files(pipeline) <= PARTITIONS * (AT - 1) * 3
    rows = read(pipeline)
    assert sorted(bytes(row["payload"]).decode() for row in rows) == sorted(
        f"event {n}" for n in range(10 * FLUSHES)
    )
    for row in rows:
        number = int(bytes(row["payload"]).decode().split()[1])
        assert row["partition"] == number % PARTITIONS
        assert row["timestamp_ms"] == 1_700_000_000_000 - number
        assert row["idempotency_key"] == (f"key-{number}" if number % 2 else None)
        assert row["headers"] == ([("number", str(number))] if number % 3 else None)
    location = pipeline.lake.require_state("t").metadata_location
    assert len(rows_in_lake(location)) == 10 * FLUSHES, "DuckDB finds them too"


def test_one_bad_file_keeps_only_its_own_partition_from_being_merged(
    gateway: Gateway, pipeline: Pipeline, tmp_path: Path
) -> None:
    for n in range(AT):
        send(gateway, 10 * n)
        with pipeline.leased("t") as work:
            work.stage_all()
            work.commit()
            work.clean()
    torn = next((tmp_path / "warehouse/t/data").rglob("partition=0/*.parquet"))
    content = torn.read_bytes()
    torn.write_bytes(content[:-20])
    assert pipeline.flush("t").events == 0
    torn.write_bytes(content)
    assert files(pipeline) == 1 + AT
    assert len(read(pipeline)) == 10 * AT


def test_trouble_with_a_merge_stops_no_flush(
    gateway: Gateway, pipeline: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(AT):
        send(gateway, 10 * n)
        if n == AT - 1:
            home = tmp_path / "warehouse/t/data"
            first = [next(home.rglob(f"partition={p}/*.parquet")) for p in range(PARTITIONS)]
            lost = {file: file.read_bytes() for file in first}
            for file in lost:
                file.unlink()
        with caplog.at_level(logging.WARNING):
            flushed = pipeline.flush("t")
        assert (flushed.events, flushed.merged_files) == (10, 0)
    assert "were not merged" in caplog.text
    for file, content in lost.items():
        file.write_bytes(content)
    send(gateway, 10 * AT)
    assert pipeline.flush("t").merged_files
    assert len(read(pipeline)) == 10 * (AT + 1)
