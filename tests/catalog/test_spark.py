"""Stock Spark on both warehouses, with the lines that `zombi connect` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.catalog.tables import EVENTS, HOURS, HTTP, commit_hours, table_url
from tests.gateway import Gateway, running
from tests.lake.staging import HOUR, Tombstones, stage
from tests.spark import SparkServer
from tests.test_cli import zombi
from zombi_platform.cuts import Range
from zombi_platform.lake.lake import Lake

pytestmark = pytest.mark.integration

ALL = EVENTS * HOURS


class Spark:
    """A session of a Spark Connect server that knows both warehouses of a gateway."""

    def __init__(self, remote: str, gateway: Gateway) -> None:
        self._session = SparkSession.builder.remote(remote).create()
        for cold in ([], ["--cold"]):
            lines = zombi(gateway.url, "connect", "spark", *cold).stdout
            for name, value in re.findall(r"--conf (\S+?)=(\S+)", lines):
                self._session.conf.set(name, value)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._session.sql(query).collect()]

    def close(self) -> None:
        self._session.stop()


@pytest.fixture
def gateway(tmp_path: Path, lake: Lake) -> Iterator[Gateway]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return commit_hours(tmp_path)


@pytest.fixture
def spark(spark_server: SparkServer, gateway: Gateway) -> Iterator[Spark]:
    session = Spark(spark_server.remote, gateway)
    yield session
    session.close()


def send(gateway: Gateway, table: str, events: int) -> None:
    body = {"records": [{"payload": "x"}] * events}
    HTTP.post(f"{gateway.url}/tables/{table}/bulk", json=body).raise_for_status()


def test_spark_lists_describes_reads_and_travels(spark: Spark, lake: Lake) -> None:
    assert spark.ask("SHOW TABLES IN lake.zombi") == [("zombi", "orders", False)]
    assert spark.ask("DESCRIBE lake.zombi.orders")[0][:2] == ("sequence", "bigint")
    assert spark.ask("SELECT count(*), max(sequence) FROM lake.zombi.orders") == [(ALL, ALL)]
    one_hour = f"SELECT count(*) FROM lake.zombi.orders WHERE event_hour = {HOUR % 24 + 1}"
    assert spark.ask(one_hour) == [(EVENTS,)]
    assert len(spark.ask("SELECT * FROM lake.zombi.orders.snapshots")) == HOURS
    assert len(spark.ask("SELECT * FROM lake.zombi.orders.files")) == HOURS
    oldest = lake.require_state("orders").lineage[-1].id
    version = f"SELECT count(*) FROM lake.zombi.orders VERSION AS OF {oldest}"
    assert spark.ask(version) == [(EVENTS,)]


def test_procedures_maintain_a_table_and_our_commits_go_on(spark: Spark, lake: Lake) -> None:
    before = lake.require_state("orders").watermarks
    compacted = spark.ask(
        "CALL lake.system.rewrite_data_files(table => 'lake.zombi.orders', strategy => 'sort', "
        "options => map('rewrite-all', 'true'))"
    )
    assert compacted[0][:2] == (HOURS, HOURS)
    assert spark.ask("CALL lake.system.rewrite_manifests('lake.zombi.orders')")
    for refused in ("expire_snapshots", "remove_orphan_files"):
        with pytest.raises(PySparkException, match="GC is disabled"):
            spark.ask(f"CALL lake.system.{refused}(table => 'lake.zombi.orders')")
    assert lake.require_state("orders").watermarks == before
    cut = stage(lake.storage, "orders", HOURS + 1, Range(0, ALL + 1, ALL + 5))
    lake.commit("orders", [cut], before_write=Tombstones())
    both = "SELECT count(*), count(DISTINCT sequence) FROM lake.zombi.orders"
    assert spark.ask(both) == [(ALL + 5, ALL + 5)]


def test_the_fence_cannot_be_moved_with_spark(spark: Spark, lake: Lake) -> None:
    before = lake.require_state("orders")
    for change in (
        "SET TBLPROPERTIES ('zombi.watermark.0'='1')",
        "UNSET TBLPROPERTIES ('zombi.watermark.0')",
    ):
        with pytest.raises(PySparkException, match="belong to the platform"):
            spark.ask(f"ALTER TABLE lake.zombi.orders {change}")
    assert lake.require_state("orders") == before


def test_every_query_sees_what_was_acked_before_it(spark: Spark, gateway: Gateway) -> None:
    counts = "SELECT count(*), count(DISTINCT sequence), max(sequence) FROM live.zombi.clicks"
    for turn in range(1, 6):
        send(gateway, "clicks", 7)
        assert spark.ask(counts) == [(7 * turn,) * 3]
    joined = "SELECT count(*) FROM live.zombi.clicks a JOIN live.zombi.clicks b USING (sequence)"
    assert spark.ask(joined) == [(35,)]
    assert spark.ask("SELECT count(*) FROM live.zombi.clicks WHERE event_hour >= 0") == [(35,)]
    assert spark.ask("SELECT count(*) FROM live.zombi.clicks WHERE event_hour < 0") == [(0,)]


def test_writers_on_the_live_view_are_refused(
    spark: Spark, gateway: Gateway, tmp_path: Path
) -> None:
    send(gateway, "clicks", 3)
    assert spark.ask("SELECT count(*) FROM live.zombi.clicks") == [(3,)]
    committed = HTTP.get(table_url(gateway, "clicks")).content
    for write in (
        "INSERT INTO live.zombi.clicks SELECT * FROM live.zombi.clicks",
        "DELETE FROM live.zombi.clicks WHERE sequence = 1",
        "ALTER TABLE live.zombi.clicks SET TBLPROPERTIES ('a'='b')",
        "DROP TABLE live.zombi.clicks",
    ):
        with pytest.raises(PySparkException, match="does not support endpoint"):
            spark.ask(write)
    assert HTTP.get(table_url(gateway, "clicks")).content == committed
    assert spark.ask("SELECT count(*) FROM live.zombi.clicks") == [(3,)]
    # What Spark had written by then lies where it is swept.
    home = tmp_path / "warehouse" / "clicks"
    assert list(home.glob("_live/refused/**/*.parquet"))
    assert not (home / "data").exists()
