"""The two write routes, served ahead of ASGI.

A subclass of uvicorn's HTTP protocol looks at the head of each request. A plain write on a
connection with nothing else under way goes straight to `Writes`; everything else, odd or
erroneous, takes FastAPI's way. Answers leave in the order of the requests: while a fast
write waits for its ack, a later request on that connection waits in uvicorn's own queue.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from zombi_platform.errors import ZombiError
from zombi_platform.events import TABLE_NAME
from zombi_platform.gateway.bodies import too_large
from zombi_platform.gateway.tokens import Principal
from zombi_platform.gateway.writes import Answer, WriteRequest, error_answer

if TYPE_CHECKING:
    from zombi_platform.gateway.state import GatewayState

HEAD_BYTES_MAX: Final = 64 * 1024
ROUTES_MAX: Final = 10_000


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


class GatewayProtocol(HttpToolsProtocol):
    """One connection. `gateway` is set on the subclass that the server is given."""

    gateway: GatewayState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write: WriteRequest | None = None
        self._body: list[bytes] = []
        self._body_size = 0
        self._waiting = False
        self._discarding = False
        self._keep_alive = True
        self._fast = self.gateway.settings.fast_lane
        self._head_size = 0
        self._authorization: bytes | None = None
        self._principal: Principal | None = None
        self._generation = -1
        self.busy_since = time.monotonic()
        """When the request under way, or the idle time, began."""
        self.receiving = False

    # What uvicorn calls

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.gateway.settings.max_connections:
            self._refuse(503, "SERVER_OVERLOADED", "too many connections; retry shortly", retry=1)

    def on_message_begin(self) -> None:
        # The scope is made in `_begin_scope`, only for requests that reach ASGI.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_size = 0
        self.receiving = True
        self.busy_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._head_size += len(url)
        if self._head_size > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        self._head_size += len(name) + len(value)
        if self._head_size > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        if self._fast and self._begin_write():
            return
        self._write = None
        self._begin_scope()
        super().on_headers_complete()

    def _begin_scope(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers

    def on_body(self, body: bytes) -> None:
        if self._write is None:
            super().on_body(body)
        elif not self._discarding:
            self._body_size += len(body)
            if self._body_size > self.gateway.writes.body_limit:
                self._discarding = True
                self._body = []
            else:
                self._body.append(body)

    def on_message_complete(self) -> None:
        self.receiving = False
        self.busy_since = time.monotonic()
        write = self._write
        if write is None:
            super().on_message_complete()
            return
        self._write = None
        if self._discarding:
            self._answer(error_answer(too_large(self.gateway.writes.body_limit)))
            return
        write.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._waiting = True
        self.cycle = cast(RequestResponseCycle, _Waiting)
        try:
            principal = self._authenticate()
        except ZombiError as error:
            self.gateway.metrics.errors += 1
            self._answer(error_answer(error))
            return
        self.gateway.writes.submit(write, principal, self._answer)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "INVALID_REQUEST", f"{msg} Send a well-formed HTTP/1.1 request.")

    def timed_out(self, now: float) -> bool:
        """Whether the connection has kept us waiting too long; the server asks every second."""
        settings = self.gateway.settings
        if self.receiving:
            return now - self.busy_since > settings.request_timeout_secs
        idle = not self._waiting and (self.cycle is None or self.cycle.response_complete)
        return idle and now - self.busy_since > settings.idle_timeout_secs

    def close_late(self) -> None:
        if self.receiving:
            self._refuse(408, "REQUEST_TIMEOUT", "the request did not arrive in time")
        else:
            self.transport.close()

    def shutdown(self) -> None:
        if self._waiting:
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
        write = WriteRequest(*route)
        for name, value in self.headers:
            if name == b"content-type":
                write.content_type = value
            elif name == b"content-encoding":
                write.content_encoding = value
            elif name == b"x-partition":
                write.partition = value
            elif name == b"prefer":
                write.prefer = value
        self._keep_alive = (
            self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        )
        self._write, self._body, self._body_size, self._discarding = write, [], 0, False
        return True

    def _authenticate(self) -> Principal:
        """The caller; a header this connection has shown before is not hashed again."""
        access = self.gateway.access
        header = next((value for name, value in self.headers if name == b"authorization"), None)
        if (
            self._principal is None
            or header != self._authorization
            or self._generation != access.generation
            or self._principal.expires != float("inf")
        ):
            self._principal = access.authenticate(header)
            self._authorization, self._generation = header, access.generation
        return self._principal

    def _answer(self, answer: Answer) -> None:
        """Send it and let the next request on this connection go on."""
        self._waiting = False
        self.busy_since = time.monotonic()
        if self.transport.is_closing():
            return
        self.transport.write(self._render(answer))
        self.cycle = self.cycle if self.pipeline else cast(RequestResponseCycle, _Done)
        if not self._keep_alive:
            self.transport.close()
            return
        self.server_state.total_requests += 1
        if self.pipeline:
            self.flow.resume_reading()
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def _render(self, answer: Answer) -> bytes:
        parts = [STATUS_LINE[answer.status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        if answer.status == 401:
            parts.append(b"www-authenticate: Bearer\r\n")
        if answer.retry_after is not None:
            parts.append(b"retry-after: %d\r\n" % answer.retry_after)
        parts.append(b"content-length: %d\r\ncontent-type: application/json\r\n" % len(answer.body))
        if not self._keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", answer.body)
        return b"".join(parts)

    def _refuse_head(self) -> None:
        self._refuse(431, "HEADERS_TOO_LARGE", f"the head is over {HEAD_BYTES_MAX} bytes")

    def _refuse(self, status: int, code: str, message: str, retry: int | None = None) -> None:
        """Answer outside any route, and close."""
        error = ZombiError(message, code=code)
        self._keep_alive = False
        if not self.transport.is_closing():
            self.transport.write(self._render(Answer(status, error_answer(error).body, retry)))
            self.transport.close()
