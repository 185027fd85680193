"""Puts a workload on a server for some seconds and says how it went.

wrk does it where it is installed: it is written in C and leaves the server a core of its own. The
fallback in Python sends the same requests over the same number of connections, but a machine with
two cores is then limited by the sender; the server's CPU time per event stays comparable.
"""

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bench.server import BenchError, Server
from bench.workload import Workload, arrow_body

SCRIPTS = Path(__file__).parent / "workloads"
GRACE_SECS = 10.0
RESULT = re.compile(r"^RESULT (.*)$", re.MULTILINE)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """What the sender saw; failed requests never get this far."""

    requests: int
    secs: float
    p50_ms: float
    p99_ms: float


def run_id() -> str:
    """Keeps the idempotency keys of two runs apart, in the shape of an address."""
    return secrets.token_hex(6)


def wrk_installed() -> bool:
    return shutil.which("wrk") is not None


def put_load(server: Server, workload: Workload, secs: int, connections: int) -> Load:
    send = send_with_wrk if wrk_installed() else send_with_python
    return send(server, workload, secs, connections)


def send_with_wrk(server: Server, workload: Workload, secs: int, connections: int) -> Load:
    # One thread: on two cores a second one would take its time from the server.
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{secs}s",
        "--timeout",
        "10s",
        "-s",
        str(SCRIPTS / workload.script),
    ]
    for name, value in server.headers.items():
        command += ["-H", f"{name}: {value}"]
    with tempfile.NamedTemporaryFile(suffix=".arrow") as body:
        body.write(arrow_body(workload.events))
        body.flush()
        variables = {"N": str(workload.events), "RUN": run_id(), "BODY": body.name}
        done = subprocess.run(
            [*command, server.url + workload.path],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=secs + GRACE_SECS,
        )
    found = RESULT.search(done.stdout)
    if done.returncode != 0 or found is None:
        raise BenchError(f"wrk failed on {workload.name}: {done.stderr or done.stdout}")
    fields = dict(item.split("=") for item in found[1].split())
    check_errors(server, workload, int(fields["non2xx"]), int(fields["sockerr"]))
    return Load(
        requests=int(fields["reqs"]),
        secs=float(fields["dur"]),
        p50_ms=float(fields["p50_ms"]),
        p99_ms=float(fields["p99_ms"]),
    )


def check_errors(server: Server, workload: Workload, refused: int, broken: int) -> None:
    if refused or broken:
        raise BenchError(
            f"{workload.name}: {refused} answers were not 2xx, {broken} connections failed; "
            f"the server's last words:\n{server.log_tail()}"
        )


@dataclass
class Tally:
    """Shared by all connections of one run of the Python sender."""

    deadline: float
    latencies_ms: list[float] = field(default_factory=list)
    refused: int = 0
    broken: int = 0


class Connection(asyncio.Protocol):
    """Keeps one request under way until the deadline, then closes."""

    def __init__(self, head: bytes, bodies: Iterator[bytes], tally: Tally) -> None:
        self.head, self.bodies, self.tally = head, bodies, tally
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = b""
        self.finished = False
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        body = next(self.bodies)
        self.sent_at = time.perf_counter()
        self.transport.write(self.head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, blank, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not blank or (length and len(body) < int(length[1])):
            return
        now = time.perf_counter()
        self.tally.latencies_ms.append((now - self.sent_at) * 1000)
        self.tally.refused += length is None or not head.startswith(b"HTTP/1.1 2")
        self.received = b""
        if now < self.tally.deadline:
            self.send()
        else:
            self.finished = True
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.tally.broken += not self.finished
        self.closed.set_result(None)


def send_with_python(server: Server, workload: Workload, secs: int, connections: int) -> Load:
    started = time.perf_counter()
    tally = Tally(deadline=started + secs)
    asyncio.run(send_all(server, workload, connections, tally, secs + GRACE_SECS))
    check_errors(server, workload, tally.refused, tally.broken)
    latencies = sorted(tally.latencies_ms)
    return Load(
        requests=len(latencies),
        secs=time.perf_counter() - started,
        p50_ms=latencies[len(latencies) // 2],
        p99_ms=latencies[len(latencies) * 99 // 100],
    )


async def send_all(
    server: Server, workload: Workload, connections: int, tally: Tally, secs_max: float
) -> None:
    address = urlsplit(server.url).netloc
    host, _, port = address.partition(":")
    head = request_head(server, workload, address)
    bodies = workload.bodies(workload.events, run_id())
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(secs_max):
        opened = [
            await loop.create_connection(lambda: Connection(head, bodies, tally), host, int(port))
            for _ in range(connections)
        ]
        await asyncio.gather(*(connection.closed for _, connection in opened))


def request_head(server: Server, workload: Workload, host: str) -> bytes:
    """The request up to its length, which may differ from one request to the next."""
    headers = {
        "Host": host,
        "Content-Type": workload.content_type,
        **server.headers,
        **dict(workload.headers),
    }
    lines = [f"POST {workload.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), ""]
    return "\r\n".join(lines).encode()
