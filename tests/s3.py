"""Object stores for tests: moto in this process, versitygw as a real server, and a proxy
between client and server that fails on demand.

moto checks no signatures; versitygw does, and conditional creates are atomic there on a
real file system. The proxy speaks plain HTTP and forwards everything as it came, so
signatures stay valid.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest

REGION = "us-east-1"
ACCESS_KEY = "zombi-tests"
SECRET_KEY = "zombi-tests-secret"


@dataclass(frozen=True)
class ObjectServer:
    """A running S3 server; `bucket()` makes a fresh one, so tests do not see each other."""

    endpoint: str

    def bucket(self) -> str:
        name = f"test-{uuid.uuid4().hex[:12]}"
        client(self.endpoint).create_bucket(Bucket=name)
        return name


def client(endpoint: str) -> Any:
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


@pytest.fixture(scope="session")
def moto() -> Iterator[ObjectServer]:
    # Imported late: most test runs do without it.
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield ObjectServer(f"http://{host}:{port}")
    server.stop()


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with running_versitygw(tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that both servers take, where both S3 clients look for them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@contextmanager
def running_versitygw(directory: Path) -> Iterator[ObjectServer]:
    binary = shutil.which("versitygw") or str(go_path() / "bin" / "versitygw")
    port = free_port()
    process = subprocess.Popen(
        [
            *(binary, "--access", ACCESS_KEY, "--secret", SECRET_KEY, "--region", REGION),
            *("--port", f"127.0.0.1:{port}", "--quiet", "posix", str(directory)),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, process)
        yield ObjectServer(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def go_path() -> Path:
    return Path(os.environ.get("GOPATH") or Path.home() / "go")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"the server exited with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not come up within a minute"
            time.sleep(0.05)


# The proxy

Match = Callable[[str, str], bool]
"""Of method and path: whether a request is meant."""


@dataclass
class Fault:
    """What happens to the requests it matches, `times` of them."""

    matches: Match
    action: str
    """`refuse` closes unanswered; `500` answers so unforwarded; `drop` forwards, then closes
    unanswered; `hang` neither forwards nor answers; `after` forwards, calls, then answers;
    `unconditional` forwards without its condition, as stores do that do not know any."""
    times: int = 1
    call: Callable[[], None] | None = None


class FaultyProxy:
    """Forwards to an upstream server and injects faults."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.removeprefix("http://")
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def inject(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for fault in self._faults:
                if fault.times > 0 and fault.matches(method, path):
                    fault.times -= 1
                    return fault
        return None

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = _read_body(handler)
        fault = self._take(handler.command, handler.path)
        action = fault.action if fault is not None else "forward"
        if action == "hang":
            self._released.wait()
        if action in ("hang", "refuse"):
            handler.close_connection = True
            return
        if action == "500":
            _answer(handler, 500, [], b"<Error><Code>InternalError</Code></Error>")
            return
        if action == "unconditional":
            del handler.headers["If-None-Match"]
        status, headers, content = self._forward(handler, body)
        if action == "drop":
            handler.close_connection = True
            return
        if fault is not None and fault.call is not None:
            fault.call()
        _answer(handler, status, headers, content)

    def _forward(
        self, handler: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body or None, encode_chunked=False)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    """The body as it came; with the framing of its chunks, if it came in chunks."""
    if "chunked" in (handler.headers.get("Transfer-Encoding") or ""):
        return b"".join(_read_chunks(handler))
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


def _read_chunks(handler: BaseHTTPRequestHandler) -> Iterator[bytes]:
    while True:
        head = handler.rfile.readline()
        yield head
        if (size := int(head.partition(b";")[0], 16)) == 0:
            break
        yield handler.rfile.read(size + 2)
    while (line := handler.rfile.readline()).strip():
        yield line
    yield line


def _answer(
    handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
) -> None:
    handler.send_response_only(status)
    for name, value in headers:
        if name.lower() not in ("connection", "transfer-encoding", "content-length"):
            handler.send_header(name, value)
    length = dict(headers).get("Content-Length") if handler.command == "HEAD" else None
    handler.send_header("Content-Length", length or str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def faulty(upstream: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
