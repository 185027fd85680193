"""The one way a write takes, whichever lane it came in by.

Admission, access, decoding and the answer's bytes live here; the lanes only bring the
request and carry the answer away. So both answer alike, byte for byte. The number and
bytes of writes in flight are bounded; past a bound a write is refused, not queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from zombi_platform.errors import OverloadedError, TransientError, ZombiError
from zombi_platform.gateway.bodies import decompress
from zombi_platform.gateway.decoding import decode_bulk, decode_single
from zombi_platform.gateway.metrics import Metrics
from zombi_platform.gateway.tokens import Principal
from zombi_platform.hot import Append, HotBuffer, Segment
from zombi_platform.settings import Settings

REQUEST_BYTES: Final = 512
"""What a request in flight is taken to cost besides its body."""

_encode = msgspec.json.Encoder().encode


class WriteRequest(msgspec.Struct, gc=False, eq=False):
    """A write as the lanes hand it over: header values raw, the body whole."""

    table: str
    bulk: bool
    content_type: bytes = b""
    content_encoding: bytes = b""
    partition: bytes | None = None
    prefer: bytes = b""
    body: bytes = b""


class Answer(msgspec.Struct, gc=False, frozen=True):
    status: int
    body: bytes
    retry_after: int | None = None


def error_answer(error: ZombiError) -> Answer:
    """The one shape of every error."""
    body = _encode({"error": str(error), "code": error.code})
    retry = error.retry_after_secs if isinstance(error, TransientError) else None
    return Answer(error.status, body, retry)


class Writes:
    """Admits, decodes and submits writes. `done` is called once, in the loop."""

    def __init__(self, settings: Settings, hot: HotBuffer, metrics: Metrics) -> None:
        self._hot = hot
        self._metrics = metrics
        self._max_writes = settings.max_inflight_writes
        self._max_bytes = settings.max_inflight_bytes_mb * 2**20
        self._max_records = settings.max_bulk_records
        self.body_limit = settings.max_body_mb * 2**20

    def submit(
        self, request: WriteRequest, principal: Principal, done: Callable[[Answer], None]
    ) -> None:
        """Answer through `done`: at once when refused, else when the events are durable."""
        started = time.perf_counter()
        try:
            principal.require("produce", request.table)
            self._admit(len(request.body))
            body = request.body
            if request.content_encoding:
                body = decompress(body, request.content_encoding, self.body_limit)
            content_type = _media_type(request.content_type)
            rows: list[Any] | None = None
            if request.bulk:
                decoded = decode_bulk(content_type, body, self._max_records)
                segments, rows = [s for s, _ in decoded], [r for _, r in decoded]
            else:
                segments = decode_single(content_type, body, request.partition)
        except ZombiError as error:
            self._metrics.errors += 1
            done(error_answer(error))
            return
        metrics, size = self._metrics, len(body)
        charge = size + REQUEST_BYTES
        metrics.inflight_writes += 1
        metrics.inflight_bytes += charge

        def finish(append: Append, error: ZombiError | None) -> None:
            metrics.inflight_writes -= 1
            metrics.inflight_bytes -= charge
            if error is not None:
                metrics.errors += 1
                done(error_answer(error))
                return
            count = sum([segment.count for segment in append.segments])
            metrics.wrote(append.table, count, size, time.perf_counter() - started)
            if rows is None:
                done(_single_answer(append))
            elif b"return=minimal" in request.prefer:
                done(_minimal_answer(append, count))
            else:
                done(_bulk_answer(append, rows, count))

        self._hot.submit(Append(request.table, segments, finish))

    def _admit(self, size: int) -> None:
        metrics = self._metrics
        if metrics.inflight_writes >= self._max_writes:
            raise OverloadedError(
                f"{metrics.inflight_writes} writes are in flight of {self._max_writes} at most "
                "(ZOMBI_MAX_INFLIGHT_WRITES); retry shortly"
            )
        if metrics.inflight_bytes and metrics.inflight_bytes + size > self._max_bytes:
            raise OverloadedError(
                f"{metrics.inflight_bytes} bytes are in flight, at most {self._max_bytes} may be "
                "(ZOMBI_MAX_INFLIGHT_BYTES_MB); retry shortly"
            )
        self._hot.check_room()


def _media_type(value: bytes) -> bytes:
    return value if value.islower() and b";" not in value else value.split(b";")[0].strip().lower()


def _offsets(segment: Segment) -> list[int] | range:
    if segment.offsets is not None:
        return segment.offsets
    return range(segment.first, segment.first + segment.count)


def _single_answer(append: Append) -> Answer:
    [segment] = append.segments
    offset = segment.first if segment.offsets is None else segment.offsets[0]
    body = f'{{"offset":{offset},"partition":{segment.partition},"table":"{append.table}"}}'
    return Answer(202, body.encode())


def _bulk_answer(append: Append, rows: list[Any], count: int) -> Answer:
    if len(rows) == 1:
        offsets = list(_offsets(append.segments[0]))
    else:
        offsets = [0] * count
        for segment, places in zip(append.segments, rows, strict=True):
            for row, offset in zip(places, _offsets(segment), strict=True):
                offsets[row] = offset
    return Answer(202, _encode({"offsets": offsets, "count": count, "table": append.table}))


def _minimal_answer(append: Append, count: int) -> Answer:
    partitions = {}
    for segment in append.segments:
        offsets = _offsets(segment)
        partitions[str(segment.partition)] = {"first": min(offsets), "last": max(offsets)}
    return Answer(202, _encode({"count": count, "table": append.table, "partitions": partitions}))
