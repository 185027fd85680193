"""The two write routes, served ahead of ASGI.

A subclass of the connection looks at the head of each request. A plain write on a
connection with nothing else under way goes straight to `Writes`; everything else, odd or
erroneous, takes FastAPI's way. A head that the connection repeats is not parsed again.
Answers leave in the order of the requests: while a fast write waits for its ack, a later
request on that connection waits in uvicorn's own queue.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any, Final, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from zombi_platform.errors import ZombiError
from zombi_platform.events import TABLE_NAME
from zombi_platform.gateway.bodies import too_large
from zombi_platform.gateway.connections import Connection, render
from zombi_platform.gateway.tokens import Principal
from zombi_platform.gateway.writes import Answer, WriteRequest, error_answer

LENGTH_DIGITS_MAX: Final = 10
ROUTES_MAX: Final = 10_000

_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length: ?([0-9]+)\r\n", re.IGNORECASE)


class _Waiting:
    """Stands in for uvicorn's cycle while a fast write waits, so that others queue up."""

    response_complete = False
    keep_alive = True
    disconnected = False

    class message_event:
        @staticmethod
        def set() -> None:
            """Nobody waits on a fast write's body."""


class _Done(_Waiting):
    response_complete = True


_WAITING: Final = cast(RequestResponseCycle, _Waiting)
_DONE: Final = cast(RequestResponseCycle, _Done)

_ROUTES: dict[bytes, tuple[str, bool] | None] = {}


def parse_route(url: bytes) -> tuple[str, bool] | None:
    """(table, bulk) of a plain write URL, else None."""
    found = _ROUTES.get(url)
    if found is None and url.startswith(b"/tables/"):
        name, slash, rest = url[8:].decode("latin-1").partition("/")
        if TABLE_NAME.fullmatch(name) and rest == ("bulk" if slash else ""):
            found = (name, bool(slash))
            if len(_ROUTES) < ROUTES_MAX:
                _ROUTES[url] = found
    return found


class Repeat(msgspec.Struct, gc=False, frozen=True):
    """A plain write's head, cut in two around its content length, and what it stands for.

    Producers send the same head over and over. At the start of a message the parser goes by
    nothing but the bytes, so the same bytes mean the same again.
    """

    before: bytes
    after: bytes
    request: WriteRequest
    principal: Principal
    generation: int

    @staticmethod
    def of(
        data: bytes, body: bytes, request: WriteRequest, principal: Principal, generation: int
    ) -> Repeat | None:
        """What to look for next, if the data was this one request and nothing else."""
        head = data[: len(data) - len(body)]
        found = _CONTENT_LENGTH.search(head)
        if found is None or int(found[1]) != len(body) or not head.startswith(b"POST "):
            return None
        if head.find(b"\r\n\r\n") != len(head) - 4:
            return None
        start, end = found.span(1)
        return Repeat(head[:start], head[end:], request, principal, generation)

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if the data is this head and exactly the body that it announces."""
        start = len(self.before)
        end = data.find(b"\r", start, start + LENGTH_DIGITS_MAX)
        if end < 0 or not data.startswith(self.before) or not data.startswith(self.after, end):
            return None
        body = data[end + len(self.after) :]
        return body if data[start:end] == b"%d" % len(body) else None


class GatewayProtocol(Connection):
    """One connection. `gateway` is set on the subclass that the server is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write: WriteRequest | None = None
        self._repeat: Repeat | None = None
        self._segment = b""
        """The data under way, if it began where a message begins."""
        self._body: list[bytes] = []
        self._body_size = 0
        self._held = 0
        """Bytes of the body under way that count against what may arrive at once."""
        self._refusal: ZombiError | None = None
        self._keep_alive = True
        self._fast = self.gateway.settings.fast_lane
        self._authorization: bytes | None = None
        self._principal: Principal | None = None
        self._generation = -1

    # What uvicorn calls

    def data_received(self, data: bytes) -> None:
        if not self.receiving:
            if self.cycle is _DONE and self._repeat is not None and self._take_repeated(data):
                return
            self._segment = data
        super().data_received(data)
        self._segment = b""
        if self._write is not None and self._body_size:
            self._hold()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_body()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        if self._fast and self._begin_write():
            return
        self._write = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._write is None:
            super().on_body(body)
            return
        self._body_came = True
        self._body_size += len(body)
        if self._body_size > self.gateway.writes.body_limit:
            self._refusal = too_large(self.gateway.writes.body_limit)
        if self._refusal is None:
            self._body.append(body)
        else:
            self._drop_body()

    def on_message_complete(self) -> None:
        write = self._write
        if write is None:
            super().on_message_complete()
            return
        self.receiving = False
        self._write = None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._drop_body()
        self.cycle = _WAITING
        try:
            if self._refusal is not None:
                raise self._refusal
            principal = self._authenticate()
        except ZombiError as error:
            self.gateway.metrics.errors += 1
            self._answer(error_answer(error))
            return
        self._repeat = None
        if self._segment and self._keep_alive and principal.expires == math.inf:
            self._repeat = Repeat.of(self._segment, body, write, principal, self._generation)
        self.gateway.writes.submit(write, body, principal, self._answer)

    def shutdown(self) -> None:
        if self.cycle is _WAITING:
            self._keep_alive = False
        else:
            super().shutdown()

    # The fast lane

    def _begin_write(self) -> bool:
        """Take the request if it is a plain write and nothing else is under way."""
        if self.parser.get_method() != b"POST" or self.expect_100_continue:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        route = parse_route(self.url)
        if route is None or self.parser.should_upgrade():
            return False
        write = WriteRequest.of(*route, self.headers)
        self._keep_alive = (
            self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        )
        self._write, self._body, self._body_size, self._refusal = write, [], 0, None
        return True

    def _hold(self) -> None:
        """Count what came of a body that is not whole, if it is still wanted."""
        if self._refusal is not None:
            return
        try:
            self.gateway.arriving.take(self._body_size - self._held)
            self._held = self._body_size
        except ZombiError as error:
            self._refusal = error
            self._drop_body()

    def _drop_body(self) -> None:
        self._body = []
        if self._held:
            self.gateway.arriving.give_back(self._held)
            self._held = 0

    def _take_repeated(self, data: bytes) -> bool:
        """Take a request whose head came before, without the parser."""
        repeat, gateway = self._repeat, self.gateway
        assert repeat is not None
        body = repeat.body_of(data)
        if body is None or len(body) > gateway.writes.body_limit:
            return False
        if repeat.generation != gateway.access.generation:
            return False
        self.cycle = _WAITING
        gateway.writes.submit(repeat.request, body, repeat.principal, self._answer)
        return True

    def _authenticate(self) -> Principal:
        """The caller; a header this connection has shown before is not hashed again."""
        access = self.gateway.access
        header = next((value for name, value in self.headers if name == b"authorization"), None)
        if (
            self._principal is None
            or header != self._authorization
            or self._generation != access.generation
            or self._principal.expires != math.inf
        ):
            self._principal = access.authenticate(header)
            self._authorization, self._generation = header, access.generation
        return self._principal

    def _answer(self, answer: Answer) -> None:
        """Send it and let the next request on this connection go on."""
        self.busy_since = time.monotonic()
        if self.transport.is_closing():
            return
        defaults = self.server_state.default_headers
        self.transport.write(render(answer, defaults, close=not self._keep_alive))
        if not self._keep_alive:
            self.transport.close()
        elif self.pipeline:
            self.flow.resume_reading()
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self.cycle = _DONE
            self.answered()
