"""The live view: events as soon as they are acked, in stock clients, on a disk and on S3."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest
from pyiceberg.catalog.rest import RestCatalog

from tests.catalog.tables import HTTP, iceberg_error, rest_catalog, table_url
from tests.gateway import Gateway, running
from tests.s3 import ObjectServer
from zombi_platform.catalog.duckdb import attach, iceberg_duckdb, use_bucket
from zombi_platform.gateway.tokens import create_token

HOUR_MS = 3_600_000
PLACES = """
    SELECT partition, count(*), count(DISTINCT sequence), max(sequence)
    FROM live.zombi.{} GROUP BY partition
"""

Counts = dict[int, int]
INTEGRATION = pytest.mark.integration


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("live")) as started:
        yield started


@pytest.fixture
def duck(gateway: Gateway) -> Iterator[duckdb.DuckDBPyConnection]:
    with iceberg_duckdb() as connection:
        attach(connection, gateway.url, "live")
        yield connection


def send(gateway: Gateway, table: str, events: int, partition: int = 0, **fields: int) -> None:
    record = {"payload": "x", "partition": partition, **fields}
    response = HTTP.post(f"{gateway.url}/tables/{table}/bulk", json={"records": [record] * events})
    assert response.status_code == 202, response.text


def counted(duck: duckdb.DuckDBPyConnection, table: str) -> Counts:
    """Events by partition; asserts that each sequence up to the last is there once."""
    rows = duck.execute(PLACES.format(table)).fetchall()
    assert all(count == distinct == last for _, count, distinct, last in rows), rows
    return {partition: count for partition, count, _, _ in rows}


def test_every_query_sees_what_was_acked_before_it(
    gateway: Gateway, duck: duckdb.DuckDBPyConnection
) -> None:
    catalog = rest_catalog(gateway, "live")
    other = 4_000_000_000
    send(gateway, "fresh", 2, partition=other)
    for turn in range(1, 25):
        send(gateway, "fresh", 3)
        assert counted(duck, "fresh") == {0: 3 * turn, other: 2 * turn}
        send(gateway, "fresh", 2, partition=other)
        assert catalog.load_table("zombi.fresh").scan().count() == 5 * turn + 2


def test_a_new_table_is_listed_and_read_before_its_first_flush(
    gateway: Gateway, duck: duckdb.DuckDBPyConnection
) -> None:
    send(gateway, "newborn", 4)
    assert ("zombi", "newborn") in rest_catalog(gateway, "live").list_tables("zombi")
    assert HTTP.head(table_url(gateway, "newborn", "live")).status_code == 204
    assert counted(duck, "newborn") == {0: 4}
    # The committed table exists from then on and is empty.
    assert rest_catalog(gateway).load_table("zombi.newborn").current_snapshot() is None


def test_rows_have_all_columns_and_hours_can_be_filtered(
    gateway: Gateway, duck: duckdb.DuckDBPyConnection
) -> None:
    base = 497_000 * HOUR_MS  # 2026-09-12T08:00Z
    for hour in range(5):
        send(gateway, "hours", hour + 1, timestamp_ms=base + hour * HOUR_MS)
    record = {"payload": "y", "idempotency_key": "k", "headers": {"a": "b"}, "timestamp_ms": base}
    HTTP.post(f"{gateway.url}/tables/hours", json=record)
    ask = "SELECT count(*) FROM live.zombi.hours WHERE event_date = '2026-09-12' AND event_hour = "
    assert duck.execute(ask + "10").fetchall() == [(3,)]
    assert duck.execute(ask + "20").fetchall() == [(0,)]
    found = duck.execute(
        "SELECT topic, payload, event_hour, headers FROM live.zombi.hours "
        "WHERE idempotency_key = 'k'"
    ).fetchall()
    assert found == [("hours", b"y", 8, {"a": "b"})]
    scan = rest_catalog(gateway, "live").load_table("zombi.hours").scan
    assert scan(row_filter="event_date = '2026-09-12' and event_hour = 12").count() == 5
    itself = (
        "SELECT count(*) FROM live.zombi.hours a "
        "JOIN live.zombi.hours b USING (partition, sequence)"
    )
    assert duck.execute(itself).fetchall() == [(16,)]


def test_an_unchanged_view_is_not_made_again(gateway: Gateway) -> None:
    url = table_url(gateway, "calm", "live")
    send(gateway, "calm", 2)
    first = HTTP.get(url)
    known = {"If-None-Match": first.headers["etag"]}
    assert HTTP.get(url, headers=known).status_code == 304
    assert HTTP.get(url).content == first.content
    send(gateway, "calm", 1)
    assert HTTP.get(url, headers=known).status_code == 200


def test_loads_and_staged_events_are_counted(gateway: Gateway) -> None:
    def figures() -> dict[str, float]:
        lines = HTTP.get(f"{gateway.url}/metrics").text.splitlines()
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        }

    before = figures()
    send(gateway, "counted", 3)
    for _ in range(2):
        HTTP.get(table_url(gateway, "counted", "live"))
    HTTP.get(table_url(gateway, "counted"))
    after = figures()
    names = [
        "zombi_live_staged_events_total",
        "zombi_live_load_seconds_count",
        "zombi_lake_load_seconds_count",
    ]
    assert [after[name] - before[name] for name in names] == [3, 2, 1]


def test_loads_at_once_share_staging_and_all_see_their_own_events(gateway: Gateway) -> None:
    catalog = rest_catalog(gateway, "live")

    def write_and_read(partition: int) -> int:
        total = 0
        for turn in range(1, 6):
            send(gateway, "crowd", 2, partition)
            rows = catalog.load_table("zombi.crowd").scan(row_filter=f"partition = {partition}")
            total += rows.count() - 2 * turn
        return total

    send(gateway, "crowd", 1, partition=99)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write_and_read, range(8))) == [0] * 8


def test_writers_are_refused_and_change_nothing(
    gateway: Gateway, duck: duckdb.DuckDBPyConnection
) -> None:
    send(gateway, "guarded", 3)
    table = rest_catalog(gateway, "live").load_table("zombi.guarded")
    committed = HTTP.get(table_url(gateway, "guarded")).content
    with pytest.raises(NotImplementedError, match="does not support endpoint"):
        table.transaction().set_properties(color="red").commit_transaction()
    duck.execute("SET unsafe_iceberg_ignore_sort_order = true")
    insert = "INSERT INTO live.zombi.guarded SELECT * FROM live.zombi.guarded"
    with pytest.raises(duckdb.TransactionException, match="read-only"):
        duck.execute(insert)
    body = {"requirements": [], "updates": []}
    refused = HTTP.post(table_url(gateway, "guarded", "live"), json=body)
    assert iceberg_error(refused) == (403, "ForbiddenException")
    assert HTTP.get(table_url(gateway, "guarded")).content == committed
    assert counted(duck, "guarded") == {0: 3}


def test_an_unknown_table_is_not_made(gateway: Gateway) -> None:
    answer = HTTP.get(table_url(gateway, "none", "live"))
    assert iceberg_error(answer) == (404, "NoSuchTableException")
    assert HTTP.head(table_url(gateway, "none", "live")).status_code == 404
    assert HTTP.head(table_url(gateway, "none")).status_code == 404


def test_many_hours_and_partitions_are_still_few_files(
    gateway: Gateway, duck: duckdb.DuckDBPyConnection
) -> None:
    records = [
        {"payload": "x", "partition": number % 50, "timestamp_ms": number * HOUR_MS}
        for number in range(2000)
    ]
    HTTP.post(f"{gateway.url}/tables/scattered/bulk", json={"records": records})
    assert counted(duck, "scattered") == dict.fromkeys(range(50), 40)
    assert rest_catalog(gateway, "live").load_table("zombi.scattered").inspect.files().num_rows == 1


def test_a_killed_staging_process_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        send(gateway, "orders", 3)
        catalog = rest_catalog(gateway, "live")
        assert catalog.load_table("zombi.orders").scan().count() == 3
        for total in (4, 5):
            for child in children_of(gateway.process.pid):
                os.kill(child, signal.SIGKILL)
            send(gateway, "orders", 1)
            assert catalog.load_table("zombi.orders").scan().count() == total
        assert len(children_of(gateway.process.pid)) == 1
        workers = children_of(gateway.process.pid)
        assert gateway.stop() == 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_files_outlive_a_restart_and_go_when_no_query_can_need_them(tmp_path: Path) -> None:
    directory = tmp_path / "warehouse" / "orders" / "_live"
    with running(tmp_path) as gateway:
        send(gateway, "orders", 1)
        early = rest_catalog(gateway, "live").load_table("zombi.orders")
    of_others = directory / "of-another-gateway.parquet"
    forgotten = directory / "of-long-ago.parquet"
    for file in (of_others, forgotten):
        file.touch()
    os.utime(forgotten, (0, 0))
    with running(tmp_path, delete_grace_secs="1") as gateway:
        catalog = rest_catalog(gateway, "live")
        for _ in range(20):
            send(gateway, "orders", 1)
            assert catalog.load_table("zombi.orders").scan().count()
        while forgotten.exists() or len(list(directory.iterdir())) > 25:
            pass
        assert of_others.exists()
        assert early.scan().to_arrow().num_rows == 1
        assert catalog.load_table("zombi.orders").scan().to_arrow().num_rows == 21


@pytest.mark.parametrize("server", ["moto", pytest.param("versitygw", marks=INTEGRATION)])
@pytest.mark.usefixtures("credentials")
def test_a_lake_in_a_bucket_is_read_live(
    request: pytest.FixtureRequest, server: str, tmp_path: Path
) -> None:
    store: ObjectServer = request.getfixturevalue(server)
    bucket = store.bucket()
    with running(tmp_path, s3_bucket=bucket, s3_endpoint=store.endpoint) as gateway:
        catalog = rest_catalog(gateway, "live")
        with iceberg_duckdb() as duck:
            config = HTTP.get(f"{gateway.url}/v1/config").json()["defaults"]
            use_bucket(duck, config)
            attach(duck, gateway.url, "live")
            for turn in range(1, 4):
                send(gateway, "orders", 3)
                assert counted(duck, "orders") == {0: 3 * turn}
                rows = catalog.load_table("zombi.orders").scan().to_arrow()
                assert rows.num_rows == 3 * turn


def test_only_readers_may_load(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    producer = create_token(file, "p", ["produce"])
    reader = create_token(file, "r", ["read"], ["orders"])
    with running(tmp_path, tokens_file=str(file)) as gateway:
        as_producer = {"Authorization": f"Bearer {producer}"}
        for table in ("orders", "secrets"):
            url = f"{gateway.url}/tables/{table}"
            assert HTTP.post(url, json={"payload": "x"}, headers=as_producer).status_code == 202
        loads = [
            HTTP.get(table_url(gateway, table, "live"), headers=headers).status_code
            for table, headers in (
                ("orders", as_producer),
                ("orders", {"Authorization": f"Bearer {reader}"}),
                ("secrets", {"Authorization": f"Bearer {reader}"}),
            )
        ]
        assert loads == [403, 200, 403]
        listed: RestCatalog = rest_catalog(gateway, "live", token=reader)
        assert listed.list_tables("zombi") == [("zombi", "orders")]


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
