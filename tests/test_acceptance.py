"""The whole way: acked events over four partitions and three hours, each engine, on a disk and
on a real object store, judged by pyiceberg, DuckDB and Spark, none of which wrote them.

ACCEPTANCE_EVENTS says how many; a million takes a few minutes for each case.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from tests.gateway import ZOMBI, Gateway, running
from tests.s3 import ObjectServer
from tests.spark import SparkServer
from zombi_platform.catalog.duckdb import attach, iceberg_duckdb, use_bucket

pytestmark = pytest.mark.integration

EVENTS = int(os.environ.get("ACCEPTANCE_EVENTS", "100000"))
PARTITIONS, HOURS, HOUR_MS = 4, 3, 3_600_000
NOON_MS = 1_700_049_600_000
BULK = 10_000
COLUMNS = ["partition", "sequence", "timestamp_ms", "payload", "event_date", "event_hour"]
SELECT = f"SELECT {', '.join(COLUMNS)} FROM lake.zombi.orders"

Judge = Callable[[], pa.Table]


class Platform:
    """A gateway, the engine's settings, and the readers that know it by its REST catalog."""

    def __init__(self, gateway: Gateway, settings: dict[str, str], spark: SparkServer) -> None:
        self.gateway = gateway
        self._settings = settings
        self._spark = spark

    def zombi(self, *words: str) -> str:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in self._settings.items()}
        environ["ZOMBI_URL"] = self.gateway.url
        done = subprocess.run(
            [ZOMBI, *words], env=environ, text=True, stdout=subprocess.PIPE, check=True
        )
        return done.stdout

    def by_pyiceberg(self) -> pa.Table:
        catalog = RestCatalog("zombi", uri=self.gateway.url, warehouse="lake")
        return catalog.load_table("zombi.orders").scan(selected_fields=tuple(COLUMNS)).to_arrow()

    def by_duckdb(self) -> pa.Table:
        with iceberg_duckdb() as connection:
            if "s3_endpoint" in self._settings:
                endpoint = self._settings["s3_endpoint"]
                use_bucket(connection, {"s3.region": "us-east-1", "s3.endpoint": endpoint})
            attach(connection, self.gateway.url, "lake")
            return connection.execute(SELECT).to_arrow_table()

    def by_spark(self) -> pa.Table:
        session = SparkSession.builder.remote(self._spark.remote).create()
        lines = self.zombi("connect", "spark", "--cold")
        for name, value in re.findall(r"--conf (\S+?)=(\S+)", lines):
            session.conf.set(name, value)
        try:
            return session.sql(SELECT).toArrow()
        finally:
            session.stop()


@pytest.fixture(params=["arrow", "spark"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["disk", "versitygw"])
def platform(
    request: pytest.FixtureRequest,
    engine: str,
    tmp_path: Path,
    credentials: None,
    spark_server: SparkServer,
    versitygw: ObjectServer,
) -> Iterator[Platform]:
    settings = {"data_dir": str(tmp_path), "engine": engine, "spark_remote": spark_server.remote}
    settings["flush_max_segment"] = str(EVENTS // 6)
    if request.param == "versitygw":
        settings |= {"s3_bucket": versitygw.bucket(), "s3_endpoint": versitygw.endpoint}
    started = {name: value for name, value in settings.items() if name != "data_dir"}
    with running(tmp_path, **started) as gateway:
        yield Platform(gateway, settings, spark_server)


def test_every_judge_reads_exactly_the_acked_events(platform: Platform) -> None:
    acked = send(platform.gateway.url)
    platform.zombi("flush", "--json")
    judges: tuple[Judge, ...] = (platform.by_pyiceberg, platform.by_duckdb, platform.by_spark)
    for judge in judges:
        check_rows(judge(), acked)
    check_files(platform, acked)


def send(url: str) -> dict[int, int]:
    """Send the events in order; the last sequence of each partition, as acked."""
    last = dict.fromkeys(range(PARTITIONS), 0)
    with httpx.Client(base_url=url, timeout=60) as client:
        for start in range(0, EVENTS, BULK):
            numbers = range(start, min(start + BULK, EVENTS))
            answer = client.post(
                "/tables/orders/bulk",
                content=body(numbers),
                headers={
                    "Content-Type": "application/vnd.apache.arrow.stream",
                    "Prefer": "return=minimal",
                },
            )
            assert answer.status_code == 202, answer.text
            for partition, found in answer.json()["partitions"].items():
                assert found["first"] == last[int(partition)] + 1
                last[int(partition)] = found["last"]
    assert sum(last.values()) == EVENTS
    return last


def body(numbers: range) -> bytes:
    batch = pa.record_batch(
        {
            "payload": pa.array([f"{number:<200}".encode() for number in numbers]),
            "partition": pa.array([number % PARTITIONS for number in numbers]),
            "timestamp_ms": pa.array([stamp_ms(number) for number in numbers]),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def stamp_ms(number: int) -> int:
    """Spread over the hours and out of order, so that every file has to be sorted."""
    return NOON_MS + number * 7919 % (HOURS * HOUR_MS)


def check_rows(table: pa.Table, acked: dict[int, int]) -> None:
    assert table.num_rows == EVENTS
    for partition, last in acked.items():
        rows = table.filter(pc.equal(table["partition"], partition)).sort_by("sequence")
        sequences = rows["sequence"].to_numpy()
        assert np.array_equal(sequences, np.arange(1, last + 1)), "a sequence is gone or twice"
        numbers = (sequences - 1) * PARTITIONS + partition
        payloads = [int(payload) for payload in rows["payload"].to_pylist()]
        assert payloads == numbers.tolist(), "a payload stands under another sequence"
        stamps = NOON_MS + numbers * 7919 % (HOURS * HOUR_MS)
        assert np.array_equal(rows["timestamp_ms"].to_numpy(), stamps)
        assert np.array_equal(rows["event_hour"].to_numpy(), stamps // HOUR_MS % 24)
        dates = rows["event_date"].cast(pa.int32()).to_numpy()
        assert np.array_equal(dates, stamps // HOUR_MS // 24)


def check_files(platform: Platform, acked: dict[int, int]) -> None:
    """Files lie under their hour, are sorted, and their bounds are those of their rows."""
    catalog = RestCatalog("zombi", uri=platform.gateway.url, warehouse="lake")
    table = catalog.load_table("zombi.orders")
    files = [task.file for task in table.scan().plan_files()]
    assert sum(file.record_count for file in files) == EVENTS
    assert {file.sort_order_id for file in files} == {table.metadata.default_sort_order_id}
    for file in files:
        with table.io.new_input(file.file_path).open() as stream:
            rows = pq.read_table(stream)
        [partition] = set(rows["partition"].to_pylist())
        [hour] = set(rows["event_hour"].to_pylist())
        place = f"/event_date=2023-11-15/event_hour={hour:02d}/partition={partition}/"
        assert place in file.file_path
        order = pc.sort_indices(rows, [("timestamp_ms", "ascending"), ("sequence", "ascending")])
        assert np.array_equal(order.to_numpy(), np.arange(rows.num_rows)), "a file is not sorted"
        for field in (1, 5):
            name = table.schema().find_column_name(field)
            low, high = pc.min_max(rows[name]).as_py().values()
            assert int.from_bytes(file.lower_bounds[field], "little") == low
            assert int.from_bytes(file.upper_bounds[field], "little") == high
