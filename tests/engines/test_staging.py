"""Staging one split: streams that are torn, answers that are lost, splits with many files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import pytest

from tests.engines.staging import HOUR_MS, TABLE, Staging
from tests.gateway import running
from tests.s3 import Fault, faulty
from zombi_platform.engines.staging import INTENT_PATHS_MAX, stage_split
from zombi_platform.errors import GatewayUnreachableError


def test_a_stream_that_is_torn_never_looks_like_its_end(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data") as gateway,
        Staging(gateway, tmp_path / "lake") as worker,
    ):
        for _ in range(6):
            body = {"records": [{"payload": "x" * 1000}] * 10_000}
            httpx.post(f"{gateway.url}/tables/{TABLE}/bulk", json=body).raise_for_status()
        cut, _ = worker.open()
        with worker.client.read_split(TABLE, cut.id, 0) as batches:
            assert next(batches).num_rows
            gateway.kill()
            with pytest.raises(GatewayUnreachableError, match="ended early"):
                list(batches)


def test_a_report_whose_answer_was_lost_keeps_its_files(staging: Staging) -> None:
    staging.send(0, [0, HOUR_MS])
    cut, job = staging.open()
    with faulty(staging.gateway.url) as proxy:
        job = dataclasses.replace(job, url=proxy.endpoint)
        proxy.inject(Fault(lambda method, _: method == "PUT", "drop"))
        with pytest.raises(GatewayUnreachableError):
            stage_split(job, cut.splits[0])
        recorded = staging.cut().files
        assert len(recorded) == 2
        again = stage_split(job, cut.splits[0])
    assert not again.kept
    assert again.files == recorded
    assert staging.files_on_disk() == {file.path for file in recorded}


def test_a_split_of_many_hours_is_announced_in_portions(tmp_path: Path) -> None:
    hours = range(INTENT_PATHS_MAX + 1)
    with (
        running(tmp_path / "data") as gateway,
        Staging(gateway, tmp_path / "lake") as worker,
        faulty(gateway.url) as proxy,
    ):
        worker.send(0, [hour * HOUR_MS for hour in hours])
        cut, job = worker.open()
        result = stage_split(dataclasses.replace(job, url=proxy.endpoint, uploads=4), cut.splits[0])
        assert sorted(file.hour for file in result.files) == list(hours)
        assert worker.files_on_disk() == {file.path for file in worker.cut().files}
    assert [path for _, path in proxy.requests if path.endswith("/intent")][1:]
