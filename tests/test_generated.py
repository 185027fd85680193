"""What others generate or keep to themselves, and we depend on: it fails here first."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import httptools
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

PROTO = Path(__file__).parent.parent / "zombi_platform/gateway/event.proto"

# What gateway/connections.py and gateway/fast_lane.py call, override or set.
METHODS = {
    "__init__": ["self", "config", "server_state", "app_state", "_loop"],
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "send_400_response": ["self", "msg"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "shutdown": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "_start_asgi_task": ["self", "cycle", "app"],
    "_unsupported_upgrade_warning": ["self"],
}
CONNECTION = {"parser", "flow", "pipeline", "cycle", "connections", "server_state", "transport"}
CYCLE = {"disconnected", "keep_alive", "message_event", "response_started", "response_complete"}


async def nothing(scope: object, receive: object, send: object) -> None:
    """An ASGI application that is never called."""


def test_uvicorn_is_the_one_whose_insides_we_know() -> None:
    assert uvicorn.__version__ == "0.54.0"
    for name, parameters in METHODS.items():
        method = getattr(HttpToolsProtocol, name)
        assert list(inspect.signature(method).parameters) == parameters, name
    protocol = HttpToolsProtocol(Config(nothing), ServerState(), {}, _loop=object())  # type: ignore[arg-type]
    assert set(vars(protocol)) >= CONNECTION | {"headers", "scope", "expect_100_continue"}
    assert set(inspect.signature(RequestResponseCycle).parameters) >= {"transport", "flow"}
    assert all(f"self.{name} = " in inspect.getsource(RequestResponseCycle) for name in CYCLE)
    assert list(inspect.signature(FlowControl).parameters) == ["transport"]
    assert {"read_paused", "write_paused"} <= set(vars(FlowControl(None)))  # type: ignore[arg-type]
    assert STATUS_LINE[202] == b"HTTP/1.1 202 Accepted\r\n"
    assert set(vars(ServerState())) >= {"connections", "tasks", "default_headers"}


def test_the_warning_we_override_is_called_with_the_upgrade_at_hand() -> None:
    """The parser says in its exception where the body begins; the hook runs in its handler."""
    source = inspect.getsource(HttpToolsProtocol.data_received)
    handler = source.partition("except httptools.HttpParserUpgrade")[2]
    assert "self._unsupported_upgrade_warning()" in handler

    class Offer:
        def on_message_complete(self) -> None:
            """Called before the body, which an upgrade leaves unparsed."""

    head = b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 2\r\n\r\n"
    try:
        httptools.HttpRequestParser(Offer()).feed_data(head + b"hi")
    except httptools.HttpParserUpgrade as upgrade:
        assert upgrade.args[0] == len(head)
    else:
        raise AssertionError("the parser ignores upgrades by itself now")


def test_the_protobuf_module_is_what_its_proto_makes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}"]
    subprocess.run([*command, f"--python_out={tmp_path}", PROTO.name], check=True)
    made = (tmp_path / "event_pb2.py").read_text()
    assert PROTO.with_name("event_pb2.py").read_text() == made
