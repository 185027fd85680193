"""One HTTP connection within limits: heads, waiting, unread answers, refusals.

uvicorn's protocol trusts its peer. It lets a head, a trailer or chunk framing grow without
end, and a pipeline too; it waits for a request, and for a reader, for ever; it answers a
broken request ahead of requests that still wait for theirs; and it closes on a peer that
is still sending, who then sees a reset instead of the reason. This class bounds and mends
these. It knows nothing of routes; the fast lane is a subclass.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from zombi_platform.errors import ZombiError
from zombi_platform.gateway.writes import Answer, error_answer

if TYPE_CHECKING:
    from zombi_platform.gateway.state import GatewayState

HEAD_BYTES_MAX: Final = 16 * 1024
LINGER_SECS: Final = 2.0
"""How long a refused peer may go on sending before the connection is cut."""
LINGERING_MAX: Final = 256
"""Connections past the limit that are told so; yet more are closed without a word."""


class RefusedError(Exception):
    """Ends the parsing of a message that has been refused."""


class Connection(HttpToolsProtocol):
    """One connection. `gateway` is set on the subclass that the server is given."""

    gateway: GatewayState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiving = False
        """Whether a message has begun that is not whole yet."""
        self.busy_since = time.monotonic()
        """When the message under way, or the idle time, began."""
        self._active: RequestResponseCycle | None = None
        self._in_body = False
        self._upgrading = False
        self._data = b""
        self._body_came = False
        self._overhead = 0
        self._refused_at: float | None = None
        self._last_words = b""
        self._unsent = 0
        self._unsent_since = self.busy_since

    # What uvicorn calls

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = Flow(transport, self)
        excess = len(self.connections) - self.gateway.settings.max_connections
        if excess > LINGERING_MAX:
            transport.close()
        elif excess > 0:
            self.refuse(503, "SERVER_OVERLOADED", "too many connections; retry shortly", retry=1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_cycles()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            return
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._body_came or not self.receiving:
            self._body_came, self._overhead = False, 0
            return
        self._overhead += len(data)
        if self._overhead > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_message_begin(self) -> None:
        # The scope is made in `begin_scope`, only for requests that reach ASGI.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_size = 0
        self.receiving = True
        self.busy_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self.receiving = self._in_body = False
        self.busy_since = time.monotonic()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if self.expect_100_continue and self.receiving:
            # Nobody knows whether the body that was never asked for will come.
            self.transport.close()
        if not more:
            self.answered()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "INVALID_REQUEST", f"{msg} Send a well-formed HTTP/1.1 request.")

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request that offers an upgrade again, without the offer.

        A server may ignore the offer, and Java's client makes it with every first request. The
        parser has ended the message before its body, and says where.
        """
        upgrade = sys.exception()
        if not self._upgrading or upgrade is None:
            return
        self._upgrading = False
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self._version())]
        lines += [b"%b: %b" % line for line in self.headers if line[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        head = b"\r\n".join([*lines, b"", b""])
        super().data_received(head + self._data[upgrade.args[0] :])

    def _version(self) -> bytes:
        return str(self.parser.get_http_version()).encode()

    # Limits

    def timed_out(self, now: float) -> bool:
        """Whether the peer has kept us waiting too long; the server asks every second."""
        settings = self.gateway.settings
        if self._refused_at is not None and not self._last_words:
            return now - self._refused_at > LINGER_SECS
        if self._unread(now):
            return True
        if self.receiving:
            return now - self.busy_since > settings.request_timeout_secs
        idle = self.cycle is None or self.cycle.response_complete
        return idle and now - self.busy_since > settings.idle_timeout_secs

    def close_late(self) -> None:
        if self._refused_at is not None or self._unsent:
            self._forget_cycles()
            self.transport.abort()
        elif self.receiving:
            self.refuse(408, "REQUEST_TIMEOUT", "the request did not arrive in time")
        else:
            self.transport.close()

    def answered(self) -> None:
        """Every answer that was due is sent; a refusal that waited for its turn follows."""
        if self._last_words:
            self._say_last(self._last_words)

    def refuse(self, status: int, code: str, message: str, retry: int | None = None) -> None:
        """Answer outside any route, after the answers that are due, and end the connection."""
        if self._refused_at is not None or self.transport.is_closing():
            return
        self._refused_at, self.receiving = time.monotonic(), True
        body = error_answer(ZombiError(message, code=code)).body
        words = render(Answer(status, body, retry), self.server_state.default_headers, close=True)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._in_body:
                self.transport.close()  # this message has its answer already
            else:
                self._say_last(words)
        elif not self._in_body:
            self._last_words = words
        elif self.pipeline:
            self.pipeline.popleft()
            self._last_words = words
        else:
            self._abandon(words)

    def _abandon(self, words: bytes) -> None:
        """The request that ASGI works on will never be whole."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.cycle.response_started:
            self.transport.close()
        else:
            self._say_last(words)

    def _forget_cycles(self) -> None:
        """Nobody is there any more. uvicorn tells only the newest request."""
        self.pipeline.clear()
        if self._active is not None:
            self._active.disconnected = True
            self._active.message_event.set()

    def _say_last(self, words: bytes) -> None:
        self._last_words = b""
        if not self.transport.is_closing():
            self.transport.write(words)
            self.transport.write_eof()
            self.flow.resume_reading()

    def _unread(self, now: float) -> bool:
        """Whether answers have waited for their reader too long, with no byte taken."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
            return False
        return now - self._unsent_since > self.gateway.settings.idle_timeout_secs

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > HEAD_BYTES_MAX:
            self._refuse_head()
            raise RefusedError

    def _refuse_head(self) -> None:
        self.refuse(431, "HEADERS_TOO_LARGE", f"the head is over {HEAD_BYTES_MAX} bytes")


class Flow(FlowControl):
    """Reads on only when nothing is queued and answers are being taken.

    uvicorn reads on whenever a request asks for its body, so that each request of a pipeline
    lets many more in.
    """

    def __init__(self, transport: Any, connection: Connection) -> None:
        super().__init__(transport)
        self._pipeline = connection.pipeline

    def resume_reading(self) -> None:
        if not self._pipeline and not self.write_paused:
            super().resume_reading()


class Heads:
    """Status lines with the server's default headers, which it renews every second."""

    def __init__(self) -> None:
        self._defaults: list[tuple[bytes, bytes]] = []
        self._heads: dict[int, bytes] = {}

    def of(self, status: int, defaults: list[tuple[bytes, bytes]]) -> bytes:
        if defaults is not self._defaults:
            self._defaults, self._heads = defaults, {}
        head = self._heads.get(status)
        if head is None:
            lines = [b"%b: %b\r\n" % line for line in defaults]
            head = self._heads[status] = b"".join([STATUS_LINE[status], *lines])
        return head


_HEADS: Final = Heads()


def render(answer: Answer, defaults: list[tuple[bytes, bytes]], *, close: bool) -> bytes:
    """An answer's bytes, as FastAPI and uvicorn would send them."""
    head = _HEADS.of(answer.status, defaults)
    if answer.status == 401:
        head += b"www-authenticate: Bearer\r\n"
    if answer.retry_after is not None:
        head += b"retry-after: %d\r\n" % answer.retry_after
    return b"%bcontent-length: %d\r\ncontent-type: application/json\r\n%b\r\n%b" % (
        head,
        len(answer.body),
        b"connection: close\r\n" if close else b"",
        answer.body,
    )
