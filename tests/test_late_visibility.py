"""Writers at full speed and flushes back to back: no watermark passes an event still on its way.

VISIBILITY_EVENTS says how many events at least; twenty million take some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.gateway import running
from tests.platform import wait_until
from zombi_platform.catalog.duckdb import iceberg_duckdb
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings

EVENTS = int(os.environ.get("VISIBILITY_EVENTS", "100000"))
FLUSHES = 4


@pytest.mark.timeout(300 + EVENTS // 10_000)
def test_no_event_is_skipped_by_a_watermark(tmp_path: Path) -> None:
    with running(tmp_path, durability="wal") as gateway:
        writers = subprocess.Popen(
            [sys.executable, "-m", "tests.full_speed", gateway.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        settings = Settings(data_dir=tmp_path, url=gateway.url, engine="arrow")
        with Pipeline.opened(settings) as pipeline:
            wait_until(lambda: hot_events(gateway.url) > 0, "the first event")
            flushed: list[int] = []
            while len(flushed) < FLUSHES or sum(flushed) < EVENTS:
                flushed.append(pipeline.flush("t").events)
            acked = json.loads(writers.communicate()[0])
            assert writers.returncode == 0
            flushed.append(pipeline.flush("t").events)
            state = pipeline.lake.require_state("t")
        assert hot_events(gateway.url) == 0
    with iceberg_duckdb() as connection:
        found = connection.execute(
            "SELECT partition, count(*), count(DISTINCT sequence), max(sequence) "
            f"FROM iceberg_scan('{state.metadata_location}') GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert found == [(p, last, last, last) for p, last in enumerate(acked["last"])]
    assert sum(acked["last"]) == sum(flushed) == acked["events"]


def hot_events(url: str) -> int:
    tables = httpx.get(f"{url}/tables").raise_for_status().json()["tables"]
    return sum(table["events"] for table in tables)
