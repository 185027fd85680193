"""Bytes that no client would send: every connection is answered with no 5xx, or closed.

A seeded generator makes garbage, broken framing and mutations of good requests, torn
anywhere. Both lanes get the same. Afterwards the gateway answers, and has not grown.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.gateway import Gateway, running
from tests.test_lanes import REQUESTS

CASES = 600
CONNECTIONS_AT_ONCE = 32
GROWTH_MB_MAX = 150
TIMEOUTS = {"request_timeout_secs": "1", "idle_timeout_secs": "1"}
GOOD = [request for request in REQUESTS.values() if len(request) < 4096]
NASTY = [b"\0", b"\r", b"\n", b"\r\n\r\n", b"\xff", b" ", b":", b"%00", b"-1", b"9" * 40, b"\x80"]


def garbage(r: random.Random) -> bytes:
    return r.randbytes(r.choice([1, 10, 1000, 100_000]))


def mutated(r: random.Random) -> bytes:
    data = bytearray(r.choice(GOOD))
    for _ in range(r.choice([1, 1, 2, 5, 20])):
        at = r.randrange(len(data))
        data[at : at + r.randrange(3)] = r.choice([*NASTY, r.randbytes(1)])
    return bytes(data)


def half(r: random.Random) -> bytes:
    data = r.choice(GOOD)
    return data[: r.randrange(1, len(data))]


def pipelined_garbage(r: random.Random) -> bytes:
    return b"".join(r.choice(GOOD) for _ in range(r.randrange(1, 9))) + garbage(r)


def bad_chunks(r: random.Random) -> bytes:
    sizes = [b"5", b"5;" + b"x" * 70_000, b"ffffffffffffffffff", b"-5", b"", b"0x5", b"g", b"5 5"]
    body = b"".join(r.choice(sizes) + b"\r\n" + b"a" * 5 + b"\r\n" for _ in range(3))
    trailer = r.choice([b"", b"X: " + b"t" * 200_000, b"Transfer-Encoding: chunked\r\n"])
    framing = r.choice([b"chunked", b"gzip, chunked", b"chunked, chunked", b"Chunked\r\nX:y"])
    head = b"POST /tables/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Transfer-Encoding: " + framing + b"\r\n\r\n" + body + b"0\r\n" + trailer


def huge_head(r: random.Random) -> bytes:
    filler = b"a" * r.choice([15_000, 70_000, 1_000_000])
    return r.choice(
        [
            b"POST /tables/" + filler + b" HTTP/1.1\r\n\r\n",
            b"POST /tables/t HTTP/1.1\r\nX: " + filler + b"\r\n\r\n",
            b"POST /tables/t HTTP/1.1\r\n" + b"X: y\r\n" * (len(filler) // 6),
            filler,
        ]
    )


def odd_head(r: random.Random) -> bytes:
    methods = [b"GET", b"POST", b"CONNECT", b"PRI", b"HEAD", b"OPTIONS", b"get", b"BREW", b"PUT"]
    urls = [b"*", b"/", b"//", b"/tables/t?limit=x", b"/tables/\xff", b"/tables/%ff%00", b"t:1"]
    urls += [b"http://h/tables/t", b"/tables/a b", b"/tables/t#f", b"/..", b"/tables//bulk"]
    lines = [b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999"]
    lines += [b"Connection: upgrade\r\nUpgrade: h2c", b"Connection: upgrade\r\nUpgrade: websocket"]
    lines += [b"Expect: 100-continue", b"Expect: tea", b"Transfer-Encoding: chunked", b"Host:"]
    lines += [b"Authorization: Bearer \xff", b"Content-Encoding: \xff", b"Accept: \xff", b": x"]
    version = r.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"ICE/1.0"])
    head = b" ".join([r.choice(methods), r.choice(urls), version])
    return b"\r\n".join([head, *r.sample(lines, r.randrange(5)), b"", b"hello"])


MAKERS: list[Callable[[random.Random], bytes]] = [
    garbage,
    mutated,
    mutated,
    mutated,
    half,
    pipelined_garbage,
    bad_chunks,
    huge_head,
    odd_head,
    odd_head,
]


def converse(gateway: Gateway, seed: int) -> bytes:
    """Send one case in pieces; read until the gateway ends the connection, which it must."""
    r = random.Random(seed)
    data = r.choice(MAKERS)(r)
    cuts = sorted(r.sample(range(len(data) + 1), min(r.randrange(4), len(data))))
    answer = b""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        try:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                connection.sendall(data[start:end])
            if r.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass  # closed while we were still sending
    return answer


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_no_bytes_on_the_socket_hang_or_break_the_gateway(tmp_path: Path, fast_lane: str) -> None:
    settings = {"fast_lane": fast_lane, "durability": "wal", "max_body_mb": "1", **TIMEOUTS}
    with running(tmp_path, **settings) as gateway:
        before = gateway.rss_mb()
        with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
            answers = list(pool.map(lambda seed: converse(gateway, seed), range(CASES)))
        statuses = [int(s) for a in answers for s in re.findall(rb"HTTP/1\.1 (\d\d\d) ", a)]
        assert not [status for status in statuses if status >= 500]
        assert statuses.count(202) > 20
        assert statuses.count(400) > 100
        assert {408, 431} < set(statuses)
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        assert gateway.rss_mb() - before < GROWTH_MB_MAX
        assert gateway.stop() == 0
