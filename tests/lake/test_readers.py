"""Readers as judges: what pyiceberg and DuckDB find is what was committed, and pruned well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import And, EqualTo, GreaterThanOrEqual
from pyiceberg.types import LongType

from tests.lake.staging import HOUR, stage
from tests.lake.worlds import World, make_world, put, rows
from zombi_platform.catalog.duckdb import iceberg_duckdb, use_bucket
from zombi_platform.catalog.warehouse import client_config
from zombi_platform.cuts import Range
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.schema import SORT_ORDER_ID
from zombi_platform.settings import Settings

FLUSHES = 24


@pytest.fixture(
    params=[
        "filesystem-disk",
        "filesystem-moto",
        pytest.param("filesystem-versitygw", marks=pytest.mark.integration),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return make_world(request.param, request, tmp_path)


@contextmanager
def connect(world: World) -> Iterator[duckdb.DuckDBPyConnection]:
    with iceberg_duckdb() as connection:
        storage = world.worker().storage
        if storage.is_s3:
            use_bucket(connection, client_config(storage))
        yield connection


def flush_often(lake: Lake) -> list[tuple[int, int]]:
    """Many small flushes over three hours; returns what readers must find."""
    for n in range(FLUSHES):
        parts = [Range(p, 3 * n + 1, 3 * n + 3) for p in (0, 9)]
        put(lake, stage(lake.storage, "orders", n + 1, *parts, hour=HOUR + n % 3))
    return sorted((p, n) for p in (0, 9) for n in range(1, 3 * FLUSHES + 1))


def test_readers_find_exactly_what_was_committed(world: World) -> None:
    lake = world.worker(snapshots_kept=5)
    expected = flush_often(lake)
    assert rows(lake) == expected
    location = lake.require_state("orders").metadata_location
    with connect(world) as duck:
        found = duck.execute(
            f"SELECT partition, sequence FROM iceberg_scan('{location}') ORDER BY ALL"
        )
        assert found.fetchall() == expected


def test_manifests_stay_few_and_name_every_file_once(tmp_path: Path) -> None:
    lake = Lake(Settings(data_dir=tmp_path))
    flush_often(lake)
    loaded = lake.load("orders")
    assert loaded is not None
    table = loaded[0]
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(table.io)) < FLUSHES / 2
    planned = [task.file.file_path for task in table.scan().plan_files()]
    assert len(planned) == len(set(planned)) == 2 * FLUSHES


def test_files_are_described_well_enough_to_be_skipped(tmp_path: Path) -> None:
    lake = Lake(Settings(data_dir=tmp_path))
    flush_often(lake)
    loaded = lake.load("orders")
    assert loaded is not None
    table = loaded[0]
    hour = And(EqualTo("event_date", "2026-09-12"), EqualTo("event_hour", 8))
    in_hour = list(table.scan(hour).plan_files())
    assert len(in_hour) == 2 * len(range(0, FLUSHES, 3))
    assert all("/event_date=2026-09-12/event_hour=08/" in task.file.file_path for task in in_hour)
    last = GreaterThanOrEqual("sequence", 3 * FLUSHES - 1)
    assert len(list(table.scan(last).plan_files())) == 2
    for task in in_hour:
        footer = pq.read_metadata(lake.storage.path(task.file.file_path))
        low, high = task.file.lower_bounds[1], task.file.upper_bounds[1]
        statistics = footer.row_group(0).column(0).statistics
        assert from_bytes(LongType(), low) == statistics.min
        assert from_bytes(LongType(), high) == statistics.max
        assert task.file.sort_order_id == SORT_ORDER_ID
        assert task.file.value_counts.keys() >= set(range(1, 9))
        assert task.file.null_value_counts[6] == task.file.record_count
