"""Bodies that are broken, wrong or too much: a clear 4xx, and the table stays as it was."""

# ruff: noqa: E501 -- a table of requests reads best with one of them on a line
from __future__ import annotations

import gzip
import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import zstandard

from tests.gateway import Gateway, running
from zombi_platform.errors import RejectedError
from zombi_platform.gateway.arrow_decoding import decode_arrow
from zombi_platform.gateway.event_pb2 import BulkWriteRequest, Event

JSON, NDJSON = "application/json", "application/x-ndjson"
PROTO, ARROW = "application/x-protobuf", "application/vnd.apache.arrow.stream"
MUTATIONS = 3_000
CLIENT = httpx.Client(timeout=60)
COUNTS = [0, 1, -1, 7, 8, 2**15, 2**24, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63)]


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return sink.getvalue()


def column(**columns: Any) -> bytes:
    return stream(pa.table({"payload": pa.array([b"p"]), **columns}))


def zstd_without_size(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


def repeated_view(value: bytes, count: int) -> pa.Array:
    """Many rows that all show the same bytes."""
    _, views, *data = pa.array([value], pa.binary_view()).buffers()
    same = pa.py_buffer(views.to_pybytes()[:16] * count)
    return pa.Array.from_buffers(pa.binary_view(), count, [None, same, *data])


def nested(depth: int) -> bytes:
    return b'{"payload":"p","x":' + b"[" * depth + b"]" * depth + b"}"


EVENT = b'{"payload":"p"}'
GZIP, ZSTD = {"Content-Encoding": "gzip"}, {"Content-Encoding": "zstd"}
ONE_VALUE_OFTEN = pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int32()), [b"x" * 900_000])

# name: (status, path, content type, body, headers)
BAD: dict[str, tuple[int, str, str, bytes, dict[str, str]]] = {
    "json cut short": (400, "", JSON, b'{"payload":"p', {}),
    "json is a list": (400, "", JSON, b"[]", {}),
    "json not utf-8": (400, "", JSON, b'{"payload":"\xff"}', {}),
    "json in utf-16": (400, "", JSON, '{"payload":"p"}'.encode("utf-16"), {}),
    "json with nul": (400, "", JSON, b'{"payload":"a\0b"}', {}),
    "json two values": (400, "", JSON, EVENT * 2, {}),
    "json lone surrogate": (400, "", JSON, b'{"payload":"\\udc00"}', {}),
    "json nested": (400, "", JSON, nested(100_000), {}),
    "payload a number": (400, "", JSON, b'{"payload":1}', {}),
    "payload missing": (400, "", JSON, b'{"partition":1}', {}),
    "partition a fraction": (400, "", JSON, b'{"payload":"p","partition":0.5}', {}),
    "partition text": (400, "", JSON, b'{"payload":"p","partition":"1"}', {}),
    "partition below": (400, "", JSON, b'{"payload":"p","partition":-1}', {}),
    "partition above": (400, "", JSON, b'{"payload":"p","partition":4294967296}', {}),
    "number huge": (400, "", JSON, b'{"payload":"p","timestamp_ms":1e400}', {}),
    "number long": (400, "", JSON, b'{"payload":"p","partition":' + b"9" * 9999 + b"}", {}),
    "timestamp below": (400, "", JSON, b'{"payload":"p","timestamp_ms":-1}', {}),
    "key too long": (400, "", JSON, json.dumps({"payload": "", "idempotency_key": "é" * 513}).encode(), {}),
    "headers not text": (400, "", JSON, b'{"payload":"p","headers":{"a":1}}', {}),
    "headers too many": (400, "", JSON, json.dumps({"payload": "", "headers": {str(i): "" for i in range(65)}}).encode(), {}),
    "bulk second bad": (400, "/bulk", JSON, b'{"records":[{"payload":"a"},{"payload":2}]}', {}),
    "bulk no list": (400, "/bulk", JSON, b'{"records":{}}', {}),
    "bulk empty": (400, "/bulk", JSON, b'{"records":[]}', {}),
    "million records": (413, "/bulk", JSON, b'{"records":[' + b"{}," * 999_999 + b"{}]}", {}),
    "million lines": (413, "/bulk", NDJSON, b"{}\n" * 1_000_000, {}),
    "ndjson second bad": (400, "/bulk", NDJSON, EVENT + b"\n{", {}),
    "ndjson nested": (400, "/bulk", NDJSON, EVENT + b"\n" + nested(100_000), {}),
    "ndjson empty": (400, "/bulk", NDJSON, b"\n\n", {}),
    "proto junk": (400, "", PROTO, b"\xff" * 100, {}),
    "proto cut short": (400, "", PROTO, Event(payload=b"x" * 100).SerializeToString()[:50], {}),
    "proto key not utf-8": (400, "", PROTO, b"\x1a\x01\xff", {}),
    "proto partition": (400, "", PROTO, b"", {"X-Partition": "x"}),
    "proto timestamp": (400, "", PROTO, Event(timestamp_ms=-5).SerializeToString(), {}),
    "proto bulk empty": (400, "/bulk", PROTO, b"", {}),
    "proto bulk junk": (400, "/bulk", PROTO, b"\x0a\xff\xff\xff\xff\x0f", {}),
    "proto million": (413, "/bulk", PROTO, b"\x0a\x00" * 1_000_000, {}),
    "proto nested groups": (400, "", PROTO, b"\x7b" * 100_000, {}),
    "arrow junk": (400, "/bulk", ARROW, b"\xff\xff\xff\xff\x10\0\0\0" + b"x" * 64, {}),
    "arrow empty": (400, "/bulk", ARROW, b"", {}),
    "arrow no payload": (400, "/bulk", ARROW, stream(pa.table({"partition": [1]})), {}),
    "arrow twice a column": (400, "/bulk", ARROW, stream(pa.Table.from_arrays([pa.array([b""])] * 2, ["payload"] * 2)), {}),
    "arrow more columns": (400, "/bulk", ARROW, column(x=[1]), {}),
    "arrow nested": (400, "/bulk", ARROW, stream(pa.table({"payload": [[b"p"]]})), {}),
    "arrow text partition": (400, "/bulk", ARROW, column(partition=["1"]), {}),
    "arrow u64 partition": (400, "/bulk", ARROW, column(partition=pa.array([2**63], pa.uint64())), {}),
    "arrow microseconds": (400, "/bulk", ARROW, column(timestamp_ms=pa.array([1], pa.timestamp("us"))), {}),
    "arrow runs": (400, "/bulk", ARROW, column(partition=pc.run_end_encode(pa.array([1]))), {}),
    "arrow null header": (400, "/bulk", ARROW, column(headers=pa.array([[("a", None)]], pa.map_(pa.string(), pa.string()))), {}),
    "arrow too many rows": (413, "/bulk", ARROW, stream(pa.table({"payload": [b""] * 10_001})), {}),
    "arrow zstd bomb": (400, "/bulk", ARROW, stream(pa.table({"payload": [bytes(2**24)] * 20}), compression="zstd"), {}),
    "arrow lz4 bomb": (400, "/bulk", ARROW, stream(pa.table({"payload": [bytes(2**24)] * 20}), compression="lz4"), {}),
    "arrow dictionary bomb": (400, "/bulk", ARROW, stream(pa.table({"payload": ONE_VALUE_OFTEN})), {}),
    "arrow view bomb": (400, "/bulk", ARROW, stream(pa.table({"payload": repeated_view(b"x" * 900_000, 3)})), {}),
    "gzip junk": (400, "", JSON, b"\x1f\x8bjunk", GZIP),
    "gzip cut short": (400, "", JSON, gzip.compress(EVENT)[:-4], GZIP),
    "gzip bomb": (413, "", JSON, gzip.compress(bytes(2**28)), GZIP),
    "gzip members bomb": (413, "", JSON, gzip.compress(bytes(2**20)) * 500, GZIP),
    "zstd junk": (400, "", JSON, b"junk", ZSTD),
    "zstd cut short": (400, "/bulk", NDJSON, zstandard.compress((EVENT + b"\n") * 50_000)[:-4], ZSTD),
    "zstd bomb": (413, "", JSON, zstandard.compress(bytes(2**28)), ZSTD),
    "zstd bomb of unknown size": (413, "", JSON, zstd_without_size(bytes(2**28)), ZSTD),
    "encoded twice": (415, "", JSON, EVENT, {"Content-Encoding": "gzip, zstd"}),
    "over the limit": (413, "", JSON, b" " * (2**22 + 1), {}),
    "no content type": (415, "", "", EVENT, {}),
    "html": (415, "/bulk", "text/html", EVENT, {}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """Close the connections that the tests kept open."""
    yield
    CLIENT.close()


@pytest.fixture(scope="module", params=["fast", "fastapi"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    lane = {"fast_lane": "true" if request.param == "fast" else "false"}
    root: Path = tmp_path_factory.mktemp("bodies")
    with running(
        root, durability="wal", max_body_mb="4", max_bulk_records="10000", **lane
    ) as running_gateway:
        first = CLIENT.post(f"{running_gateway.url}/tables/t", json={"payload": "first"})
        assert first.json()["offset"] == 1
        yield running_gateway


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_and_changes_nothing(gateway: Gateway, name: str) -> None:
    status, path, content_type, body, headers = BAD[name]
    before, rss = state(gateway), gateway.rss_mb()
    if content_type:
        headers = {**headers, "Content-Type": content_type}
    answer = CLIENT.post(f"{gateway.url}/tables/t{path}", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "code"}
    if "second bad" in name:
        assert "1" in answer.json()["error"]
    assert state(gateway) == before
    assert gateway.rss_mb() - rss < 200


@pytest.mark.parametrize("name", ["a%2Fb", "a%00", "%00", "..", "a b", "ü", "a" * 129, "9a", "%ff"])
def test_a_bad_table_name_is_refused(gateway: Gateway, name: str) -> None:
    before = state(gateway)
    for path in (f"/tables/{name}", f"/tables/{name}/bulk"):
        answer = CLIENT.post(gateway.url + path, json={"payload": "p"})
        assert answer.status_code in (400, 404, 405), answer.text
        assert set(answer.json()) == {"error", "code"}
    assert state(gateway) == before


def state(gateway: Gateway) -> Any:
    tables = CLIENT.get(f"{gateway.url}/tables").json()["tables"]
    for table in tables:
        del table["oldest_unflushed_secs"]
    return tables, CLIENT.get(f"{gateway.url}/tables/t/watermark").json()


def good_streams() -> list[bytes]:
    """Valid streams of every kind of column, most of which only a mutation makes us refuse."""
    rows = 7
    base = {
        "payload": pa.array([b"x" * i for i in range(rows)]),
        "partition": pa.array(range(rows)),
        "timestamp_ms": pa.array([5] * rows, pa.timestamp("ms")),
        "idempotency_key": pa.array([f"k{i}" if i % 2 else None for i in range(rows)]),
        "headers": pa.array([[("a", "b")]] * rows, pa.map_(pa.string(), pa.string())),
    }
    others = [
        {"payload": base["payload"].cast(pa.large_binary())},
        {"payload": base["payload"].cast(pa.string_view())},
        {"payload": pa.array(["a"] * rows).dictionary_encode()},
        {"partition": pc.run_end_encode(pa.array([1] * rows))},
        {"payload": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"] * rows))},
        {"payload": pa.array([[{"a": 1}]] * rows)},
    ]
    tables = [pa.table(base), *(pa.table({**base, **other}) for other in others)]
    return [stream(table, compression=codec) for table in tables for codec in (None, "zstd")]


def mutate(r: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 4])):
        at = r.randrange(len(changed) + 1) & ~7
        edit: Callable[[], Any] = r.choice(
            [
                lambda: changed.__setitem__(slice(at, at + 1), r.randbytes(1)),  # noqa: B023
                lambda: changed.__setitem__(slice(at, at + 8), struct.pack("<q", r.choice(COUNTS))),  # noqa: B023
                lambda: changed.__setitem__(slice(at, at + r.randrange(32)), r.randbytes(16)),  # noqa: B023
                lambda: changed.__delitem__(slice(at, at + r.randrange(64))),  # noqa: B023
            ]
        )
        edit()
    return bytes(changed)


def test_mutated_arrow_streams_are_decoded_or_refused() -> None:
    """In this process: a crash would end the test run."""
    r, streams = random.Random(3), good_streams()
    refused = 0
    for _ in range(MUTATIONS):
        try:
            decode_arrow(mutate(r, r.choice(streams)), 100_000)
        except RejectedError:
            refused += 1
    assert 0 < refused < MUTATIONS


def test_mutated_protobuf_is_decoded_or_refused(gateway: Gateway) -> None:
    r = random.Random(4)
    records = [{"payload": b"x" * i, "partition": i, "idempotency_key": str(i)} for i in range(5)]
    good = BulkWriteRequest(records=records).SerializeToString()
    for _ in range(300):
        answer = CLIENT.post(
            f"{gateway.url}/tables/mutated/bulk",
            content=mutate(r, good),
            headers={"Content-Type": PROTO},
        )
        assert answer.status_code in (202, 400, 413), answer.text
