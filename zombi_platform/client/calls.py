"""The gateway's routes as typed calls.

Every call goes through `GatewayClient.request`: the one place for address, token, timeouts
and the translation of answers to the error tree. Nothing is retried here; whoever calls
knows whether a repetition is safe.
"""

from __future__ import annotations

import ssl
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from zombi_platform.errors import (
    GatewayUnreachableError,
    RejectedError,
    SettingsError,
    TerminalError,
    TransientError,
    ZombiError,
)

CONNECT_TIMEOUT_SECS: Final = 5.0
RETRYABLE: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request may succeed; a 500 means that it will not."""
SHOWN_TEXT_MAX: Final = 200
ERROR_BYTES_MAX: Final = 2**20

T = TypeVar("T")


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event as the gateway gives it out."""

    partition: int
    sequence: int
    timestamp_ms: int
    payload: str | None = None
    payload_base64: bytes | None = None
    idempotency_key: str | None = None
    headers: dict[str, str] | None = None

    @property
    def data(self) -> bytes:
        """The payload's bytes, whether or not they are text."""
        return self.payload.encode() if self.payload is not None else self.payload_base64 or b""


class Page(msgspec.Struct, frozen=True):
    records: list[Event]
    has_more: bool


class TableInfo(msgspec.Struct, frozen=True):
    table: str
    partitions: int
    events: int
    bytes: int
    oldest_unflushed_secs: float | None


class Marks(msgspec.Struct, frozen=True):
    """How far one partition has come."""

    high_watermark: int
    flush_watermark: int
    cleanup_watermark: int


class Readiness(msgspec.Struct, frozen=True):
    status: str
    hot_storage: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        return self.status == "ready"


class _Tables(msgspec.Struct):
    tables: list[TableInfo]


class _Watermarks(msgspec.Struct):
    partitions: dict[str, Marks]


class _ErrorBody(msgspec.Struct):
    error: str
    code: str


@cache
def _certificates() -> ssl.SSLContext:
    """Loaded once for a process, for it takes 20 ms: more than staging a small split."""
    return httpx.create_ssl_context()


class GatewayClient:
    """A connection to one gateway; safe to share between threads."""

    def __init__(self, url: str, token: str | None = None, *, timeout_secs: float = 60.0) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise SettingsError(f"gateway address {url!r} must begin with http:// or https://")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base_path = urlsplit(self.url).path
        self._timeout_secs = timeout_secs
        timeout = httpx.Timeout(timeout_secs, connect=min(timeout_secs, CONNECT_TIMEOUT_SECS))
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=self._headers, timeout=timeout, verify=_certificates()
            )
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
            raise SettingsError(f"gateway address {url!r} or its token: {error}") from error

    def tables(self) -> list[TableInfo]:
        return decode(self.request("GET", "/tables"), _Tables).tables

    def read(
        self,
        table: str,
        *,
        partition: int | None = None,
        offset: int = 0,
        limit: int = 100,
        since: int | None = None,
    ) -> Page:
        """Hot events: of a partition by sequence, or of all by time."""
        given = {"partition": partition, "offset": offset, "limit": limit, "since": since}
        params = {name: value for name, value in given.items() if value is not None}
        return decode(self.request("GET", table_path(table), params=params), Page)

    def watermarks(self, table: str) -> dict[int, Marks]:
        found = decode(self.request("GET", f"{table_path(table)}/watermark"), _Watermarks)
        return {int(number): marks for number, marks in found.partitions.items()}

    def health(self) -> Readiness:
        """Whether the gateway can take writes; also when it says that it cannot."""
        answer = self.request("GET", "/health/ready", accept=(200, 503))
        return decode(answer, Readiness)

    def stats(self) -> dict[str, Any]:
        return decode(self.request("GET", "/stats"), dict[str, Any])

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | float] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Container[int] = range(200, 300),
        timeout_secs: float | None = None,
    ) -> httpx.Response:
        """One request; an answer that is not accepted is raised as the error it stands for."""
        with self._reaching(method, path):
            answer = self._http.request(
                method,
                path,
                params=params,
                content=content,
                headers=headers,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_secs is None else timeout_secs,
            )
        if answer.status_code not in accept:
            raise to_error(answer)
        return answer

    @contextmanager
    def stream(self, path: str) -> Iterator[HTTPResponse]:
        """The answer to a GET as a file, drawn as it is read.

        By the standard library: for streams of hundreds of megabytes httpx takes five times
        its CPU time.
        """
        connection = self._connect()
        try:
            with self._reaching("GET", path):
                connection.request("GET", self._base_path + path, headers=self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise to_error(_whole(self.url + path, answer))
            yield answer
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.netloc, timeout=self._timeout_secs)

    @contextmanager
    def _reaching(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, ConnectionRefusedError) as error:
            raise GatewayUnreachableError(
                f"no gateway answers at {self.url}: {error}; start one with `zombi gateway` "
                "or set ZOMBI_URL",
                retry_after_secs=0,
            ) from error
        except (httpx.RequestError, HTTPException, OSError) as error:
            raise GatewayUnreachableError(
                f"{method} {self.url}{path} got no answer: {str(error) or type(error).__name__}",
                retry_after_secs=0,
            ) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(url: str, answer: HTTPResponse) -> httpx.Response:
    """A refusal of a stream, as httpx would have it."""
    return httpx.Response(
        answer.status,
        headers=answer.getheaders(),
        content=answer.read(ERROR_BYTES_MAX),
        request=httpx.Request("GET", url),
    )


def table_path(table: str) -> str:
    return f"/tables/{quote(table, safe='')}"


def to_error(answer: httpx.Response) -> ZombiError:
    """The error an answer stands for: by its code if that is known, else by its status."""
    status = answer.status_code
    try:
        body = msgspec.json.decode(answer.content, type=_ErrorBody)
    except msgspec.DecodeError:
        shown = " ".join(answer.text.split())[:SHOWN_TEXT_MAX]
        text = f"{answer.url} answered {status}, not as a gateway does: {shown!r}"
        body = _ErrorBody(text, f"HTTP_{status}")
    kind = _kind(status, body.code)
    if issubclass(kind, TransientError):
        return kind(body.error, code=body.code, retry_after_secs=_retry_after_secs(answer))
    return kind(body.error, code=body.code)


def _kind(status: int, code: str) -> type[ZombiError]:
    if status in RETRYABLE:
        return next((k for k in _kinds(TransientError) if k.code == code), TransientError)
    if 400 <= status < 500:
        kinds = list(_kinds(RejectedError))
        fitting = [k for k in kinds if k.status == status and k is not RejectedError]
        return next((k for k in fitting if k.code == code), (fitting or [RejectedError])[0])
    return TerminalError


def _kinds(root: type[ZombiError]) -> Iterator[type[ZombiError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _retry_after_secs(answer: httpx.Response) -> int:
    value = answer.headers.get("retry-after", "")
    return int(value) if value.isascii() and value.isdigit() else 1


def decode(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.DecodeError as error:
        raise TerminalError(
            f"{answer.url} answered {answer.status_code} with a body that is not a gateway's: "
            f"{error}; is ZOMBI_URL right?"
        ) from error
