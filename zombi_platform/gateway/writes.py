"""The one way a write takes, whichever lane it came in by.

Admission, access, decoding and the answer's bytes live here; the lanes only bring the
request and carry the answer away. So both answer alike, byte for byte. The number and
bytes of writes in flight are bounded; past a bound a write is refused, not queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np

from zombi_platform.errors import OverloadedError, TransientError, ZombiError
from zombi_platform.gateway.bodies import decompress
from zombi_platform.gateway.confirmation import Confirmation
from zombi_platform.gateway.decoding import decode_bulk, decode_single
from zombi_platform.gateway.metrics import Metrics
from zombi_platform.gateway.records import Places
from zombi_platform.gateway.tokens import Principal
from zombi_platform.hot import Append, HotBuffer, Segment
from zombi_platform.settings import Settings

REQUEST_BYTES: Final = 512
"""What a request in flight is taken to cost besides its body."""

_encode = msgspec.json.Encoder().encode


class WriteRequest(msgspec.Struct, gc=False, frozen=True):
    """What the head of a write says."""

    table: str
    bulk: bool
    content_type: bytes = b""
    content_encoding: bytes = b""
    partition: bytes | None = None
    minimal: bool = False

    @staticmethod
    def of(table: str, bulk: bool, headers: Iterable[tuple[bytes, bytes]]) -> WriteRequest:
        """From header lines with names in lower case; of a repeated name the last one counts."""
        found = dict(headers)
        return WriteRequest(
            table,
            bulk,
            found.get(b"content-type", b"").split(b";")[0].strip().lower(),
            found.get(b"content-encoding", b""),
            found.get(b"x-partition"),
            b"return=minimal" in found.get(b"prefer", b""),
        )


class Write(Append, gc=False, eq=False, kw_only=True):
    """A write on its way through the hot buffer, with what its answer needs."""

    request: WriteRequest
    places: Places
    size: int
    started: float
    answer: Callable[[Answer], None]


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
    """Admits, decodes and submits writes. Each is answered once, in the loop."""

    def __init__(
        self, settings: Settings, hot: HotBuffer, metrics: Metrics, confirmation: Confirmation
    ) -> None:
        self._check_room, self._submit = hot.check_room, hot.submit
        self._open, self._hold = confirmation.open, confirmation.hold
        self._metrics = metrics
        self._max_writes = settings.max_inflight_writes
        self._max_bytes = settings.max_inflight_bytes_mb * 2**20
        self._max_records = settings.max_bulk_records
        self.body_limit = settings.max_body_mb * 2**20

    def submit(
        self,
        request: WriteRequest,
        body: bytes,
        principal: Principal,
        answer: Callable[[Answer], None],
    ) -> None:
        """Call `answer`: at once when refused, else when the events are durable."""
        started = time.perf_counter()
        try:
            principal.require("produce", request.table)
            self._admit(len(body))
            if request.content_encoding:
                body = decompress(body, request.content_encoding, self.body_limit)
            places: Places = None
            if request.bulk:
                segments, places = decode_bulk(request.content_type, body, self._max_records)
            else:
                segments = [decode_single(request.content_type, body, request.partition)]
        except ZombiError as error:
            self._metrics.errors += 1
            answer(error_answer(error))
            return
        size = len(body)
        self._metrics.inflight_writes += 1
        self._metrics.inflight_bytes += size + REQUEST_BYTES
        submit = self._submit if request.table in self._open else self._hold
        submit(
            Write(
                request.table,
                segments,
                self._finish,
                request=request,
                places=places,
                size=size,
                started=started,
                answer=answer,
            )
        )

    def _finish(self, write: Write, error: ZombiError | None) -> None:
        metrics = self._metrics
        metrics.inflight_writes -= 1
        metrics.inflight_bytes -= write.size + REQUEST_BYTES
        if error is not None:
            metrics.errors += 1
            write.answer(error_answer(error))
            return
        seconds = time.perf_counter() - write.started
        if not write.request.bulk:
            metrics.wrote(write.table, 1, write.size, seconds)
            write.answer(_single_answer(write))
            return
        count = sum([segment.count for segment in write.segments])
        metrics.wrote(write.table, count, write.size, seconds)
        if write.request.minimal:
            write.answer(_minimal_answer(write, count))
        else:
            write.answer(_bulk_answer(write.segments, write.places, count, write.table))

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
        self._check_room()


def _offsets(segment: Segment) -> list[int] | range:
    if segment.offsets is not None:
        return segment.offsets
    return range(segment.first, segment.first + segment.count)


def _single_answer(append: Append) -> Answer:
    [segment] = append.segments
    offset = segment.first if segment.offsets is None else segment.offsets[0]
    body = f'{{"offset":{offset},"partition":{segment.partition},"table":"{append.table}"}}'
    return Answer(202, body.encode())


def _bulk_answer(segments: list[Segment], places: Places, count: int, table: str) -> Answer:
    offsets = _in_order(segments, places, count)
    return Answer(202, _encode({"offsets": offsets, "count": count, "table": table}))


def _in_order(segments: list[Segment], places: Places, count: int) -> list[int]:
    """The offsets in the order of the request's records."""
    if places is None:
        return list(_offsets(segments[0]))
    if isinstance(places, list):
        following = {segment.partition: iter(_offsets(segment)) for segment in segments}
        return list(map(next, map(following.__getitem__, places)))
    offsets = np.empty(count, dtype=np.int64)
    for segment in segments:
        found = segment.offsets or np.arange(segment.first, segment.first + segment.count)
        offsets[places == segment.partition] = found
    return offsets.tolist()


def _minimal_answer(append: Append, count: int) -> Answer:
    partitions = {}
    for segment in append.segments:
        offsets = _offsets(segment)
        partitions[str(segment.partition)] = {"first": min(offsets), "last": max(offsets)}
    return Answer(202, _encode({"count": count, "table": append.table, "partitions": partitions}))
