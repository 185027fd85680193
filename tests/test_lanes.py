"""The fast lane and the FastAPI routes answer alike, byte for byte."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.gateway import Gateway, running
from zombi_platform.gateway.event_pb2 import BulkWriteRequest, Event
from zombi_platform.gateway.tokens import create_token, revoke_token


def arrow(**columns: list[object]) -> bytes:
    table = pa.table(columns)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def post(path: str, body: bytes, content_type: str = "application/json", *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {content_type}"]
    head += [f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunked(path: str, *chunks: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + body


def records(*items: object) -> bytes:
    return json.dumps({"records": items}).encode()


EVENT = b'{"payload":"p","timestamp_ms":5}'
PROTO = Event(payload=b"\xff", timestamp_ms=5, headers={"a": "b"}).SerializeToString()
PROTO_BULK = BulkWriteRequest(
    records=[{"payload": b"1", "partition": 3}, {"payload": b"2", "timestamp_ms": 9}]
).SerializeToString()
X_PROTO, X_ARROW = "application/x-protobuf", "application/vnd.apache.arrow.stream"

REQUESTS = {
    "single": post("/tables/t", EVENT),
    "charset": post("/tables/t", EVENT, "application/json; charset=utf-8"),
    "keyed": post("/tables/t", b'{"payload":"p","idempotency_key":"k"}'),
    "keyed again": post("/tables/t", b'{"payload":"p","idempotency_key":"k"}'),
    "base64": post("/tables/t", b'{"payload_base64":"/w=="}'),
    "bad base64": post("/tables/t", b'{"payload_base64":"*"}'),
    "both payloads": post("/tables/t", b'{"payload":"a","payload_base64":"/w=="}'),
    "headers": post("/tables/t", b'{"payload":"p","headers":{"a":"b"}}'),
    "no payload": post("/tables/t", b"{}"),
    "broken json": post("/tables/t", b'{"payload":'),
    "wrong type": post("/tables/t", b'{"payload":1}'),
    "deep": post("/tables/t", b'{"x":' + b"[" * 50_000 + b"}"),
    "huge number": post("/tables/t", b'{"payload":"p","partition":1' + b"0" * 400 + b"}"),
    "year 10000": post("/tables/t", b'{"payload":"p","timestamp_ms":253402300800000}'),
    "surrogate": post("/tables/t", b'{"payload":"\\ud800"}'),
    "empty": post("/tables/t", b""),
    "bad name": post("/tables/9t", EVENT),
    "nul name": post("/tables/a%00b", EVENT),
    "slash name": post("/tables/a%2Fb", EVENT),
    "no type": post("/tables/t", EVENT, "text/plain"),
    "protobuf": post("/tables/t", PROTO, X_PROTO, "X-Partition: 7"),
    "bad partition": post("/tables/t", PROTO, X_PROTO, "X-Partition: -1"),
    "u33 partition": post("/tables/t", PROTO, X_PROTO, "X-Partition: 4294967296"),
    "broken protobuf": post("/tables/t", b"\xff\xff", X_PROTO),
    "gzip": post("/tables/t", gzip.compress(EVENT), "application/json", "Content-Encoding: gzip"),
    "bomb": post(
        "/tables/t", gzip.compress(bytes(2**25)), "application/json", "Content-Encoding: gzip"
    ),
    "not gzip": post("/tables/t", EVENT, "application/json", "Content-Encoding: gzip"),
    "brotli": post("/tables/t", EVENT, "application/json", "Content-Encoding: br"),
    "bulk": post("/tables/t/bulk", records({"payload": "a"}, {"payload": "é", "partition": 1})),
    "bulk minimal": post(
        "/tables/t/bulk", records({"payload": "a"}), "application/json", "Prefer: return=minimal"
    ),
    "bulk bad record": post("/tables/t/bulk", records({"payload": "a"}, {"payload": 2})),
    "bulk no records": post("/tables/t/bulk", records()),
    "bulk too many": post("/tables/t/bulk", records(*[{"payload": ""}] * 11)),
    "ndjson": post("/tables/t/bulk", EVENT + b"\n" + EVENT, "application/x-ndjson"),
    "bad ndjson": post("/tables/t/bulk", EVENT + b"\n{]", "application/x-ndjson"),
    "proto bulk": post("/tables/t/bulk", PROTO_BULK, X_PROTO),
    "arrow": post("/tables/t/bulk", arrow(payload=[b"a", b"b"], partition=[2, 1]), X_ARROW),
    "arrow range": post("/tables/t/bulk", arrow(payload=[b"a"], partition=[-1]), X_ARROW),
    "arrow null": post("/tables/t/bulk", arrow(payload=[b"a", None]), X_ARROW),
    "broken arrow": post("/tables/t/bulk", b"ARROW1", X_ARROW),
    "chunked": chunked("/tables/t", EVENT[:5], EVENT[5:]),
    "expect": post("/tables/t", EVENT, "application/json", "Expect: 100-continue"),
    "upgrade": post(
        "/tables/t", EVENT, "application/json", "Connection: Upgrade, X", "Upgrade: h2c"
    ),
    "over the limit": post("/tables/t", bytes(2**20 + 1)),
    "chunked over the limit": chunked("/tables/t", *[bytes(2**18)] * 5),
}


def exchange(port: int, data: bytes, seed: int | None = None) -> bytes:
    """Send requests, torn where `seed` says, and read until the server closes."""
    cuts = [] if seed is None else sorted(random.Random(seed).sample(range(len(data)), 5))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            connection.sendall(data[start:end])
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return re.sub(rb"date: [^\r]*", b"date: -", answer)


def last(request: bytes) -> bytes:
    """The same request, after which the server closes the connection."""
    return request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Gateway]]:
    limits = {"max_body_mb": "1", "max_bulk_records": "10", "durability": "wal"}
    root: Path = tmp_path_factory.mktemp("lanes")
    with (
        running(root / "fast", **limits) as fast,
        running(root / "slow", fast_lane="false", **limits) as slow,
    ):
        yield fast, slow


@pytest.mark.parametrize("name", REQUESTS)
def test_each_request_is_answered_alike(lanes: tuple[Gateway, Gateway], name: str) -> None:
    fast, slow = (exchange(lane.port, last(REQUESTS[name])) for lane in lanes)
    assert fast == slow
    assert re.match(rb"HTTP/1\.1 (100|202|4\d\d) ", fast)


@pytest.mark.parametrize("seed", range(10))
def test_torn_and_pipelined_requests_are_answered_alike(
    lanes: tuple[Gateway, Gateway], seed: int
) -> None:
    chosen = random.Random(seed).sample([n for n in REQUESTS if "limit" not in n], 6)
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    requests = [REQUESTS[name] for name in chosen]
    data = b"".join([*requests[:3], get, *requests[3:], last(get)])
    fast, slow = (exchange(lane.port, data, seed) for lane in lanes)
    assert fast == slow
    assert fast.count(b'{"status":"ok"}') == 2


def converse(port: int, pieces: list[tuple[bytes, int]]) -> list[bytes]:
    """Send pieces one by one, reading as many answers as each piece is to get."""
    answers = []
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        connection.makefile("rb") as stream,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece, expected in pieces:
            connection.sendall(piece)
            if not expected:
                settle(port)
            for _ in range(expected):
                head = b"".join(iter(stream.readline, b"\r\n"))
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None, head
                answers.append(re.sub(rb"date: [^\r]*", b"", head) + stream.read(int(length[1])))
    return answers


def settle(port: int) -> None:
    """Return when the server has read what was sent before, here by asking it something."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked.request("GET", "/health")
    assert asked.getresponse().read()
    asked.close()


def test_a_repeated_head_is_answered_like_the_first(lanes: tuple[Gateway, Gateway]) -> None:
    one, two = post("/tables/r", b'{"payload":"1"}'), post("/tables/r", b'{"payload":"10"}')
    other = post("/tables/r", PROTO, X_PROTO, "X-Partition: 1")
    pieces = [
        *((post("/tables/r", b'{"payload":"%d"}' % 10**n), 1) for n in range(12)),
        (one + two, 2),
        (two + b"\r\n", 1),
        (two, 1),
        (one.replace(b"Length: 15", b"Length: 015"), 1),
        (post("/tables/r", b""), 1),
        (post("/tables/r", b'{"payload":'), 1),
        (one, 1),
        (other, 1),
        (other, 1),
        (other.replace(b"Partition: 1", b"Partition: 2"), 1),
        (one, 1),
        (post("/tables/r/bulk", records({"payload": "a"})), 1),
        (post("/tables/r/bulk", records({"payload": "b"}, {"payload": "c"})), 1),
    ]
    fast, slow = (converse(lane.port, pieces) for lane in lanes)
    assert fast == slow
    assert [answer[9:12] for answer in fast].count(b"400") == 2


@pytest.mark.parametrize("cut", [1, 40, 80, -len(EVENT) - 1, -len(EVENT), -1])
def test_a_repeated_head_may_come_in_two_pieces(lanes: tuple[Gateway, Gateway], cut: int) -> None:
    whole = post("/tables/p", EVENT)
    pieces = [(whole, 1), (whole, 1), (whole[:cut], 0), (whole[cut:], 1), (whole, 1)]
    fast, slow = (converse(lane.port, pieces) for lane in lanes)
    assert fast == slow
    assert len(set(fast)) == 4


def test_a_repeated_head_is_refused_once_its_token_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = create_token(file, "producer", ["produce"])
    request = post("/tables/t", EVENT, "application/json", f"Authorization: Bearer {token}")
    with (
        running(tmp_path / "data", tokens_file=str(file)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection,
    ):
        connection.sendall(request)
        assert b" 202 " in connection.recv(65536)
        revoke_token(file, "producer")
        answer = b" 202 "
        while b" 202 " in answer:
            connection.sendall(request)
            answer = connection.recv(65536)
        assert b" 401 " in answer


def test_an_offer_to_upgrade_is_ignored_and_the_body_read(lanes: tuple[Gateway, Gateway]) -> None:
    for lane in lanes:
        assert b" 202 Accepted" in exchange(lane.port, last(REQUESTS["upgrade"]))


def test_offsets_come_in_the_order_of_the_records(lanes: tuple[Gateway, Gateway]) -> None:
    partitions, keys = [1, 0, 1, 1, 0, 0], ["a", "b", None, "a", None, "b"]
    items = [
        {"payload": "p", "partition": partition, "idempotency_key": key}
        for partition, key in zip(partitions, keys, strict=True)
    ]
    columns: dict[str, list[object]] = {
        "payload": ["p"] * 6,
        "partition": [*partitions],
        "idempotency_key": [*keys],
    }
    json_bulk, arrow_bulk = records(*items), arrow(**columns)
    plain = records(*({"payload": "p", "partition": partition} for partition in partitions))
    plain_arrow = arrow(**{n: v for n, v in columns.items() if n != "idempotency_key"})
    for lane in lanes:
        answers = converse(
            lane.port,
            [
                (post("/tables/order-json/bulk", json_bulk), 1),
                (post("/tables/order-arrow/bulk", arrow_bulk, X_ARROW), 1),
                (post("/tables/order-json/bulk", plain), 1),
                (post("/tables/order-arrow/bulk", plain_arrow, X_ARROW), 1),
            ],
        )
        offsets = [json.loads(answer[answer.index(b"{") :])["offsets"] for answer in answers]
        assert offsets == [[1, 1, 2, 1, 2, 1]] * 2 + [[3, 3, 4, 5, 4, 5]] * 2
