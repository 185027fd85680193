"""Peers that are slow, idle, too many or out of order, and a clean stop under them."""

from __future__ import annotations

import json
import re
import resource
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from tests.gateway import Gateway, running
from tests.test_lanes import EVENT, arrow, post

IDLE_CONNECTIONS = 10_000
FILES_BESIDES_CONNECTIONS = 500
RSS_MB_MAX = 500
ARROW = "application/vnd.apache.arrow.stream"


def connect(gateway: Gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=60)


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


def read_answer(connection: socket.socket) -> bytes:
    """One answer, or nothing if the connection has ended."""
    answer = b""
    try:
        while (part := connection.recv(65536)) and (answer := answer + part):
            head, _, body = answer.partition(b"\r\n\r\n")
            if len(body) == int(head.partition(b"content-length: ")[2].split(b"\r")[0] or -1):
                break
    except ConnectionError:
        return b""
    return answer


def write(gateway: Gateway, table: str = "t") -> int:
    answer = httpx.post(f"{gateway.url}/tables/{table}", json={"payload": "x"}, timeout=60)
    assert answer.status_code == 202, answer.text
    offset: int = answer.json()["offset"]
    return offset


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_a_slow_sender_is_told_and_cut_off_and_nothing_is_stored(
    tmp_path: Path, fast_lane: str
) -> None:
    with running(tmp_path, request_timeout_secs="0.5", fast_lane=fast_lane) as gateway:
        for sent in (b"POST /tab", post("/tables/t", EVENT)[:-5]):
            with connect(gateway) as connection:
                connection.sendall(sent)
                answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"REQUEST_TIMEOUT"' in answer
        assert httpx.get(f"{gateway.url}/tables").json() == {"tables": []}
        assert write(gateway) == 1


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_bodies_that_arrive_slowly_are_bounded_and_leave_others_alone(
    tmp_path: Path, fast_lane: str
) -> None:
    body = b'{"payload":"' + b"x" * 900_000 + b'"}'
    settings = {"max_inflight_bytes_mb": "4", "max_body_mb": "1", "fast_lane": fast_lane}
    with running(tmp_path, **settings) as gateway, ExitStack() as stack:
        slow = [stack.enter_context(connect(gateway)) for _ in range(8)]
        for connection in slow:
            connection.sendall(post("/tables/t", body)[:-2])
        assert write(gateway, "other") == 1
        for connection in slow:
            connection.sendall(b'"}')
        statuses = [connection.recv(12)[-3:] for connection in slow]
        assert sorted(set(statuses)) == [b"202", b"503"]
        assert statuses.count(b"202") <= 4
        answer = httpx.post(f"{gateway.url}/tables/t", content=body, headers=JSON)
        assert answer.status_code == 202, "what the others held was not given back"


JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with 64 MB of events, few open reads and short patience."""
    settings = {"durability": "wal", "max_open_reads": "4", "idle_timeout_secs": "2"}
    with running(tmp_path_factory.mktemp("filled"), **settings) as gateway:
        body = arrow(payload=[b"x" * 16_384] * 500)
        for _ in range(8):
            answer = httpx.post(
                f"{gateway.url}/tables/t/bulk", content=body, headers={"Content-Type": ARROW}
            )
            assert answer.status_code == 202
        yield gateway


def test_slow_readers_are_bounded_delay_nobody_and_are_cut_off(filled: Gateway) -> None:
    before = filled.rss_mb()
    request = f"GET /tables/t?limit=1000000 HTTP/1.1\r\nHost: x\r\nAccept: {ARROW}\r\n\r\n"
    with ExitStack() as stack:
        readers = [stack.enter_context(connect(filled)) for _ in range(4)]
        for reader in readers:
            reader.sendall(request.encode())
            assert reader.recv(12) == b"HTTP/1.1 200"
        assert write(filled, "other") >= 1
        refused = httpx.get(f"{filled.url}/tables/t")
        assert (refused.status_code, refused.json()["code"]) == (503, "SERVER_OVERLOADED")
        assert refused.headers["retry-after"] == "1"
        assert filled.rss_mb() - before < 100
        # Readers that take nothing for the idle time make room for those who do.
        while httpx.get(f"{filled.url}/tables/t?limit=1").status_code == 503:
            pass
    page = httpx.get(f"{filled.url}/tables/t?limit=1000000", headers={"Accept": ARROW})
    assert pa.ipc.open_stream(page.content).read_all().num_rows == 4000


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_a_producer_that_never_reads_its_acks_is_bounded(tmp_path: Path, fast_lane: str) -> None:
    settings = {"durability": "wal", "idle_timeout_secs": "2", "fast_lane": fast_lane}
    with running(tmp_path, **settings) as gateway:
        before = gateway.rss_mb()
        body = json.dumps({"records": [{"payload": ""}] * 2000}).encode()
        request = post("/tables/t/bulk", body)
        with connect(gateway) as connection, pytest.raises((TimeoutError, ConnectionError)):
            connection.settimeout(10)
            for _ in range(20_000):
                connection.sendall(request)
        assert gateway.rss_mb() - before < 150
        assert write(gateway, "other") == 1


def test_ten_thousand_idle_connections_leave_room_for_writes(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(IDLE_CONNECTIONS, hard - FILES_BESIDES_CONNECTIONS)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with running(tmp_path) as gateway, ExitStack() as stack:
            idle = [stack.enter_context(connect(gateway)) for _ in range(count)]
            idle[0].sendall(post("/tables/t", EVENT))
            idle[-1].sendall(post("/tables/t", EVENT))
            assert idle[0].recv(12) == idle[-1].recv(12) == b"HTTP/1.1 202"
            assert write(gateway) == 3
            assert gateway.rss_mb() < RSS_MB_MAX
            assert gateway.stop() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_past_the_limit_are_told_to_come_back(tmp_path: Path) -> None:
    with running(tmp_path, max_connections="3") as gateway, ExitStack() as stack:
        kept = [stack.enter_context(connect(gateway)) for _ in range(3)]
        for connection in kept:
            connection.sendall(post("/tables/t", EVENT))
            assert connection.recv(65536).startswith(b"HTTP/1.1 202 ")
        with connect(gateway) as refused:
            refused.sendall(post("/tables/t", EVENT))
            answer = read_to_end(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert b'"code":"SERVER_OVERLOADED"' in answer
        kept[0].close()
        while True:
            with connect(gateway) as next_one:
                next_one.sendall(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
                if read_to_end(next_one).startswith(b"HTTP/1.1 200 "):
                    break


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_garbage_behind_a_write_does_not_take_the_place_of_its_ack(
    tmp_path: Path, fast_lane: str
) -> None:
    with running(tmp_path, fast_lane=fast_lane) as gateway:
        with connect(gateway) as connection:
            connection.sendall(post("/tables/t", EVENT) * 2 + b"\0garbage")
            answer = read_to_end(connection)
        assert re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer) == [b"202", b"202", b"400"]


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_a_head_over_the_limit_writes_nothing(tmp_path: Path, fast_lane: str) -> None:
    with running(tmp_path, fast_lane=fast_lane) as gateway:
        with connect(gateway) as connection:
            request = post("/tables/t", EVENT, "application/json", "X: " + "y" * 20_000)
            connection.sendall(request)
            assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")
        assert httpx.get(f"{gateway.url}/tables").json() == {"tables": []}


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_sigterm_lets_writes_in_flight_have_their_acks(tmp_path: Path, fast_lane: str) -> None:
    """Every request that was sent before the stop is acked, and every ack is stored."""
    acked: set[int] = set()
    with running(tmp_path, fast_lane=fast_lane) as gateway, ExitStack() as stack:
        connections = [stack.enter_context(connect(gateway)) for _ in range(50)]
        stopping = threading.Thread(target=gateway.stop)
        rounds = 0
        selector = selectors.DefaultSelector()
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(post("/tables/t", EVENT))
        open_ones = set(connections)
        while open_ones:
            for key, _ in selector.select():
                connection = key.fileobj  # type: ignore[assignment]
                answer = read_answer(connection)
                if not answer:
                    selector.unregister(connection)
                    open_ones.discard(connection)
                    continue
                assert answer.startswith(b"HTTP/1.1 202 "), answer
                acked.add(json.loads(answer.partition(b"\r\n\r\n")[2])["offset"])
                rounds += 1
                if rounds == 500:
                    stopping.start()
                if b"connection: close" not in answer:
                    try:
                        connection.sendall(post("/tables/t", EVENT))
                    except ConnectionError:
                        continue
        stopping.join()
        assert gateway.process.returncode == 0
    with running(tmp_path) as again:
        stored = httpx.get(f"{again.url}/tables").json()["tables"][0]["events"]
        assert acked == set(range(1, len(acked) + 1))
        assert len(acked) >= 500
        assert stored == len(acked)
