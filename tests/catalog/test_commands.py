"""`zombi query` and `zombi connect` against a real gateway; what is printed is really pasted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.catalog.tables import HTTP, commit_hours
from tests.gateway import Gateway, running
from tests.test_cli import zombi
from zombi_platform.catalog.duckdb import iceberg_duckdb
from zombi_platform.gateway.tokens import create_token

COMMITTED = 10
TOKEN: dict[str, str] = {}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One table is committed, one is hot, and a token is needed for both."""
    data_dir = tmp_path_factory.mktemp("query")
    commit_hours(data_dir, "orders", 1)
    file = data_dir / "tokens.json"
    TOKEN["ZOMBI_TOKEN"] = create_token(file, "all", ["admin"])
    with running(data_dir, tokens_file=str(file)) as started:
        records = [{"payload": "a"}, {"payload": '{"n": 2}'}, {"payload_base64": "/w=="}]
        HTTP.post(
            f"{started.url}/tables/clicks/bulk",
            json={"records": records},
            headers={"Authorization": f"Bearer {TOKEN['ZOMBI_TOKEN']}"},
        ).raise_for_status()
        yield started


def query(gateway: Gateway, *args: str) -> str:
    result = zombi(gateway.url, "query", *args, **TOKEN)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_tables_go_by_their_names_and_hot_events_are_seen(gateway: Gateway) -> None:
    shown = query(gateway, "SELECT count(*) AS events FROM clicks")
    assert "events" in shown
    assert " 3 " in shown
    joined = "SELECT count(*) AS n FROM orders o JOIN clicks c USING (sequence)"
    assert json.loads(query(gateway, joined, "--json")) == {"n": 3}


def test_json_and_csv_show_payloads_as_text(gateway: Gateway) -> None:
    ask = "SELECT sequence, payload FROM clicks ORDER BY sequence"
    rows = [json.loads(line) for line in query(gateway, ask, "--json").splitlines()]
    assert [row["payload"] for row in rows] == ["a", '{"n": 2}', "ff"]
    assert query(gateway, ask, "--csv").splitlines()[:2] == ["sequence,payload", "1,a"]


def test_cold_queries_see_committed_events_only(gateway: Gateway) -> None:
    count = "SELECT count(*) AS n FROM orders"
    assert json.loads(query(gateway, count, "--json", "--cold")) == {"n": COMMITTED}
    result = zombi(gateway.url, "query", "SELECT * FROM nowhere", "--cold", **TOKEN)
    assert (result.returncode, result.stdout) == (1, "")
    assert "nowhere" in result.stderr


def test_a_gateway_that_is_down_or_refuses_is_one_line(gateway: Gateway) -> None:
    down = zombi("http://127.0.0.1:1", "query", "SELECT 1")
    assert (down.returncode, down.stderr.count("\n")) == (1, 1)
    assert "127.0.0.1:1" in down.stderr
    refused = zombi(gateway.url, "query", "SELECT 1")
    assert refused.returncode == 1
    assert "401" in refused.stderr or "token" in refused.stderr


def test_the_lines_for_duckdb_work(gateway: Gateway) -> None:
    lines = zombi(gateway.url, "connect", "duckdb", **TOKEN).stdout
    # The extensions are there already; INSTALL would ask the internet.
    lines = "\n".join(line for line in lines.splitlines() if not line.startswith("INSTALL"))
    assert TOKEN["ZOMBI_TOKEN"] not in lines
    with iceberg_duckdb() as duck:
        # Only DuckDB's shell has getenv.
        duck.execute(lines.replace("getenv('ZOMBI_TOKEN')", f"'{TOKEN['ZOMBI_TOKEN']}'"))
        assert duck.execute("SELECT count(*) FROM clicks").fetchall() == [(3,)]


def test_the_lines_for_pyiceberg_work(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = zombi(gateway.url, "connect", "pyiceberg", **TOKEN).stdout
    monkeypatch.setenv("ZOMBI_TOKEN", TOKEN["ZOMBI_TOKEN"])
    assert TOKEN["ZOMBI_TOKEN"] not in lines
    names: dict[str, Any] = {}
    exec(lines, names)
    assert names["catalog"].load_table("zombi.clicks").scan().count() == 3


def test_spark_is_told_not_to_keep_tables_as_they_were(gateway: Gateway) -> None:
    live = zombi(gateway.url, "connect", "spark", **TOKEN).stdout
    assert "spark.sql.catalog.live.cache-enabled=false" in live
    cold = zombi(gateway.url, "connect", "spark", "--cold", **TOKEN).stdout
    assert f"spark.sql.catalog.lake.uri={gateway.url}" in cold


def test_trino_finds_the_bucket(tmp_path: Path) -> None:
    where = {"s3_bucket": "b", "s3_endpoint": "http://127.0.0.1:1", "s3_max_retries": "0"}
    with running(tmp_path, **where) as gateway:
        lines = zombi(gateway.url, "connect", "trino").stdout.splitlines()
    assert "iceberg.rest-catalog.warehouse=live" in lines
    assert "s3.endpoint=http://127.0.0.1:1" in lines


def test_an_engine_that_is_not_known_is_refused(gateway: Gateway) -> None:
    result = zombi(gateway.url, "connect", "abacus", **TOKEN)
    assert result.returncode == 2
    assert "abacus" in result.stderr
