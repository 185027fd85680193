"""The committed tables over Iceberg REST: plain requests, and stock clients of each engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pyiceberg.exceptions import CommitFailedException, ForbiddenError
from pyiceberg.table.update import AssertTableUUID, SetPropertiesUpdate

from tests.catalog.tables import (
    EVENTS,
    HOURS,
    HTTP,
    commit_hours,
    iceberg_error,
    rest_catalog,
    table_url,
)
from tests.gateway import Gateway, running
from tests.lake.staging import HOUR
from zombi_platform.catalog.duckdb import attach, iceberg_duckdb
from zombi_platform.gateway.tokens import create_token
from zombi_platform.lake.lake import Lake

ALL = EVENTS * HOURS


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lake")


@pytest.fixture(scope="module")
def lake(data_dir: Path) -> Lake:
    commit_hours(data_dir, "clicks", 1)
    return commit_hours(data_dir)


@pytest.fixture(scope="module")
def gateway(data_dir: Path, lake: Lake) -> Iterator[Gateway]:
    with running(data_dir) as started:
        yield started


def get(gateway: Gateway, path: str, **headers: str) -> httpx.Response:
    return HTTP.get(gateway.url + path, headers=headers)


def test_config_names_the_warehouse_as_prefix(gateway: Gateway) -> None:
    for query in ("", "?warehouse=lake"):
        assert get(gateway, "/v1/config" + query).json()["overrides"] == {"prefix": "lake"}
    refused = get(gateway, "/v1/config?warehouse=pond")
    assert iceberg_error(refused) == (400, "BadRequestException")


def test_every_advertised_endpoint_is_there_and_no_other(gateway: Gateway) -> None:
    advertised = get(gateway, "/v1/config").json()["endpoints"]
    document = get(gateway, "/openapi.json").json()["paths"]
    served = {
        f"{method.upper()} {path.replace('/v1/lake/', '/v1/{prefix}/')}"
        for path, methods in document.items()
        if path.startswith("/v1/lake/")
        for method in methods
    }
    assert set(advertised) == served


@pytest.mark.parametrize("prefix", ["/v1", "/v1/lake"])
def test_namespaces_and_tables(gateway: Gateway, prefix: str) -> None:
    assert get(gateway, f"{prefix}/namespaces").json()["namespaces"] == [["zombi"]]
    assert get(gateway, f"{prefix}/namespaces?parent=zombi").json()["namespaces"] == []
    assert get(gateway, f"{prefix}/namespaces/zombi").json()["namespace"] == ["zombi"]
    assert HTTP.head(f"{gateway.url}{prefix}/namespaces/zombi").status_code == 204
    assert HTTP.head(f"{gateway.url}{prefix}/namespaces/other").status_code == 404
    tables = get(gateway, f"{prefix}/namespaces/zombi/tables").json()["identifiers"]
    assert [table["name"] for table in tables] == ["clicks", "orders"]
    assert HTTP.head(f"{gateway.url}{prefix}/namespaces/zombi/tables/orders").status_code == 204
    assert HTTP.head(f"{gateway.url}{prefix}/namespaces/zombi/tables/none").status_code == 404


def test_lists_come_in_pages_when_asked_for(gateway: Gateway) -> None:
    url = "/v1/lake/namespaces/zombi/tables"
    first = get(gateway, f"{url}?pageToken=&pageSize=1").json()
    second = get(gateway, f"{url}?pageToken={first['next-page-token']}&pageSize=1").json()
    names = [page["identifiers"][0]["name"] for page in (first, second)]
    assert names == ["clicks", "orders"]
    assert second["next-page-token"] is None


def test_errors_have_the_shape_and_types_that_clients_know(gateway: Gateway) -> None:
    tables = "/v1/lake/namespaces/zombi/tables"
    assert iceberg_error(get(gateway, f"{tables}/none")) == (404, "NoSuchTableException")
    assert iceberg_error(get(gateway, f"{tables}/%2Fetc")) == (404, "NotFoundException")
    assert iceberg_error(get(gateway, "/v1/lake/namespaces/x")) == (404, "NoSuchNamespaceException")
    # What Spark asks before it reads the metadata table `orders.snapshots`.
    probe = get(gateway, "/v1/lake/namespaces/zombi%1Forders/tables/snapshots")
    assert iceberg_error(probe) == (404, "NoSuchTableException")
    dropped = HTTP.delete(table_url(gateway))
    assert iceberg_error(dropped) == (405, "UnsupportedOperationException")
    assert iceberg_error(get(gateway, f"{tables}/orders?snapshots=x"))[0] == 400


def test_a_load_passes_the_metadata_file_through(gateway: Gateway, lake: Lake) -> None:
    state = lake.require_state("orders")
    stored = Path(state.metadata_location.removeprefix("file://")).read_bytes()
    answer = HTTP.get(table_url(gateway))
    assert answer.json()["metadata-location"] == state.metadata_location
    assert stored in answer.content


def test_an_unchanged_table_is_not_sent_again(gateway: Gateway, lake: Lake) -> None:
    url = table_url(gateway, "clicks")
    known = HTTP.get(url).headers["etag"]
    again = HTTP.get(url, headers={"If-None-Match": known})
    assert (again.status_code, again.content) == (304, b"")
    # The same version with fewer snapshots is another answer.
    assert HTTP.get(f"{url}?snapshots=refs", headers={"If-None-Match": known}).status_code == 200
    rest_catalog(gateway).load_table("zombi.clicks").transaction().set_properties(
        color="red"
    ).commit_transaction()
    assert HTTP.get(url, headers={"If-None-Match": known}).status_code == 200


def test_a_table_made_again_is_not_taken_for_the_old_one(gateway: Gateway, data_dir: Path) -> None:
    lake = commit_hours(data_dir, "again", 1)
    before = HTTP.get(table_url(gateway, "again"))
    lake.catalog.drop_table((lake.namespace, "again"))
    assert HTTP.get(table_url(gateway, "again")).status_code == 404
    commit_hours(data_dir, "again", 1)
    after = HTTP.get(table_url(gateway, "again"), headers={"If-None-Match": before.headers["etag"]})
    assert after.json()["metadata-location"] == before.json()["metadata-location"]
    assert after.json()["metadata"]["table-uuid"] != before.json()["metadata"]["table-uuid"]
    lake.catalog.drop_table((lake.namespace, "again"))


def test_snapshots_without_a_branch_are_left_out_when_asked(gateway: Gateway, lake: Lake) -> None:
    all_of_them = HTTP.get(table_url(gateway)).json()["metadata"]
    named = HTTP.get(table_url(gateway), params={"snapshots": "refs"}).json()["metadata"]
    assert len(all_of_them["snapshots"]) == HOURS
    assert [s["snapshot-id"] for s in named["snapshots"]] == [
        lake.require_state("orders").snapshot_id
    ]
    assert {**all_of_them, "snapshots": []} == {**named, "snapshots": []}


def test_pyiceberg_lists_describes_reads_and_travels(gateway: Gateway, lake: Lake) -> None:
    catalog = rest_catalog(gateway)
    assert catalog.list_namespaces() == [("zombi",)]
    assert catalog.list_tables("zombi") == [("zombi", "clicks"), ("zombi", "orders")]
    table = catalog.load_table("zombi.orders")
    assert table.schema().column_names[:3] == ["sequence", "topic", "partition"]
    assert table.scan().count() == ALL
    assert table.scan(row_filter=f"event_hour = {HOUR % 24 + 1}").to_arrow().num_rows == EVENTS
    oldest = table.metadata.snapshots[0].snapshot_id
    assert table.scan(snapshot_id=oldest).count() == EVENTS
    assert table.inspect.snapshots().num_rows == HOURS
    assert table.inspect.files().num_rows == HOURS


def test_duckdb_lists_describes_reads_and_travels(gateway: Gateway, lake: Lake) -> None:
    with iceberg_duckdb() as duck:
        attach(duck, gateway.url, "lake")

        def ask(query: str) -> list[tuple[object, ...]]:
            return duck.execute(query).fetchall()

        assert {row[2] for row in ask("SHOW ALL TABLES")} == {"clicks", "orders"}
        assert ask("DESCRIBE lake.zombi.orders")[0][0] == "sequence"
        assert ask("SELECT count(*), max(sequence) FROM lake.zombi.orders") == [(ALL, ALL)]
        one_hour = f"SELECT count(*) FROM lake.zombi.orders WHERE event_hour = {HOUR % 24 + 1}"
        assert ask(one_hour) == [(EVENTS,)]
        snapshots = ask(
            "SELECT snapshot_id FROM iceberg_snapshots('lake.zombi.orders') "
            "ORDER BY sequence_number"
        )
        assert len(snapshots) == HOURS
        version = f"AT (VERSION => {snapshots[0][0]})"
        assert ask(f"SELECT count(*) FROM lake.zombi.orders {version}") == [(EVENTS,)]


def test_only_our_own_commits_may_change_the_fence(gateway: Gateway, lake: Lake) -> None:
    table = rest_catalog(gateway).load_table("zombi.orders")
    before = lake.require_state("orders")
    with pytest.raises(ForbiddenError, match="belong to the platform"):
        table.transaction().set_properties({"zombi.watermark.0": "1"}).commit_transaction()
    with pytest.raises(ForbiddenError, match="belong to the platform"):
        table.transaction().remove_properties("zombi.watermark.0").commit_transaction()
    assert lake.require_state("orders") == before


def test_commits_are_made_refused_or_told_to_start_over(gateway: Gateway, lake: Lake) -> None:
    catalog = rest_catalog(gateway)
    table = catalog.load_table("zombi.clicks")
    change = (SetPropertiesUpdate(updates={"size": "big"}),)
    done = catalog.commit_table(table, (AssertTableUUID(uuid=table.metadata.table_uuid),), change)
    assert lake.require_state("clicks").metadata_location == done.metadata_location
    other = rest_catalog(gateway).load_table("zombi.orders").metadata.table_uuid
    with pytest.raises(CommitFailedException):
        catalog.commit_table(table, (AssertTableUUID(uuid=other),), change)
    for body in (b"{", b"{}", b'{"requirements":[],"updates":[{"action":"fly"}]}'):
        response = HTTP.post(table_url(gateway, "clicks"), content=body)
        assert iceberg_error(response) == (400, "BadRequestException")
    nothing = json.dumps({"requirements": [], "updates": []})
    missing = HTTP.post(table_url(gateway, "none"), content=nothing)
    assert iceberg_error(missing) == (404, "NoSuchTableException")


@pytest.mark.parametrize(
    ("update", "refused"),
    [
        ({"action": "set-location", "location": "file:///elsewhere"}, (403, "ForbiddenException")),
        (
            {"action": "assign-uuid", "uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1"},
            (403, "ForbiddenException"),
        ),
        ({"action": "remove-properties", "removals": ["none"]}, (400, "BadRequestException")),
    ],
    ids=["moved", "another identity", "nothing to remove"],
)
def test_a_table_stays_the_one_it_is(
    gateway: Gateway, lake: Lake, update: dict[str, object], refused: tuple[int, str]
) -> None:
    before = lake.require_state("orders")
    body = {"requirements": [], "updates": [update]}
    assert iceberg_error(HTTP.post(table_url(gateway), json=body)) == refused
    assert lake.require_state("orders") == before


def test_a_metrics_report_is_taken(gateway: Gateway) -> None:
    assert HTTP.post(table_url(gateway) + "/metrics", json={"report-type": "x"}).status_code == 204


def test_tokens_open_only_their_tables_and_roles(tmp_path: Path) -> None:
    commit_hours(tmp_path, "orders", 1)
    commit_hours(tmp_path, "clicks", 1)
    file = tmp_path / "tokens.json"
    reader = create_token(file, "reader", ["read"], ["orders"])
    pipeline = create_token(file, "pipeline", ["pipeline"])
    producer = create_token(file, "producer", ["produce"])
    with running(tmp_path, tokens_file=str(file)) as gateway:

        def status(token: str | None, table: str, body: bytes | None = None) -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            method = "GET" if body is None else "POST"
            url = table_url(gateway, table)
            return HTTP.request(method, url, headers=headers, content=body).status_code

        nothing = b'{"requirements":[],"updates":[]}'
        assert [status(t, "orders") for t in (None, producer, reader, pipeline)] == [
            401,
            403,
            200,
            200,
        ]
        assert status(reader, "clicks") == 403
        assert status(reader, "orders", nothing) == 403
        assert status(pipeline, "orders", nothing) == 200
        # Stock clients sign in with client credentials, and see what they may read.
        sign_in = {"oauth2-server-uri": f"{gateway.url}/v1/oauth/tokens"}
        stock = rest_catalog(gateway, credential=f"{reader.split('_')[1]}:{reader}", **sign_in)
        assert stock.list_tables("zombi") == [("zombi", "orders")]
        assert stock.load_table("zombi.orders").scan().count() == EVENTS
        with iceberg_duckdb() as duck:
            attach(duck, gateway.url, "lake", reader)
            assert duck.execute("SELECT count(*) FROM lake.zombi.orders").fetchall() == [(EVENTS,)]
        wrong = HTTP.post(
            f"{gateway.url}/v1/oauth/tokens",
            data={"grant_type": "client_credentials", "client_id": "x", "client_secret": "y"},
        )
        assert (wrong.status_code, wrong.json()["error"]) == (401, "invalid_client")


def test_clients_are_told_where_the_bucket_is_but_no_secrets(tmp_path: Path) -> None:
    where = {"s3_bucket": "b", "s3_endpoint": "http://127.0.0.1:1", "s3_region": "eu-north-1"}
    where["s3_max_retries"] = "0"
    with running(tmp_path, **where) as gateway:
        config = get(gateway, "/v1/config").json()["defaults"]
    assert config == {
        "s3.endpoint": "http://127.0.0.1:1",
        "s3.path-style-access": "true",
        "s3.region": "eu-north-1",
        "client.region": "eu-north-1",
    }
