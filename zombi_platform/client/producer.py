"""Sends events from a Python program, in batches, from a thread of its own.

Every event has an idempotency key, of the caller's or the producer's making, and a batch is
repeated with the same keys until it is answered: a lost answer neither loses nor doubles an
event. One request is under way at a time, so events of a partition keep the order in which
they were sent. Memory is bounded: past the queue's limits `send` waits or raises.
"""

from __future__ import annotations

import random
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final, Self

import msgspec

from zombi_platform.client.batch import EVENT_BYTES, Batch, BulkAnswer, Placed
from zombi_platform.client.calls import GatewayClient, decode, table_path
from zombi_platform.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    TerminalError,
    TransientError,
    ZombiError,
)
from zombi_platform.events import check_partition, check_table

RETRY_FIRST_SECS: Final = 0.05
RETRY_MOST_SECS: Final = 5.0
STOP_WAIT_SECS: Final = 1.0
REJECTIONS_MAX: Final = 32
"""Rejected requests after which the rest of a batch is given up: its fault is not one event's."""

_NAMED_RECORD: Final = re.compile(r"record (\d+): ")
_TOO_MUCH_AT_ONCE: Final = frozenset({"PAYLOAD_TOO_LARGE", "TOO_MANY_RECORDS"})
_HEADERS: Final = {"Content-Type": "application/vnd.apache.arrow.stream"}
_HEADERS_BRIEF: Final = {**_HEADERS, "Prefer": "return=minimal"}


class Receipt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What `send` gives: tells later where the event went. One is made for every event."""

    _batch: Batch
    _row: int

    def done(self) -> bool:
        return self._batch.settled.is_set()

    def result(self, timeout: float | None = None) -> Placed:
        """Partition and offset, waiting for them; raises what the event failed with."""
        if not self._batch.settled.wait(timeout):
            raise TransientError(f"no answer for the event within {timeout:g} s")
        return self._batch.placed(self._row)


class Producer:
    """Sends events to one table. `flush` and `close` raise the first failure since the last.

    A batch leaves when it has `batch_events` or `batch_bytes`, or `linger_secs` after its
    first event. An event that no try delivered within `delivery_secs` fails with
    `TransientError`; whether it is stored is then unknown, unless the same key is sent again.
    """

    def __init__(
        self,
        url: str,
        table: str,
        *,
        token: str | None = None,
        batch_events: int = 10_000,
        batch_bytes: int = 2**20,
        linger_secs: float = 0.02,
        queue_events: int = 100_000,
        queue_bytes: int = 64 * 2**20,
        block: bool = True,
        delivery_secs: float = 120.0,
        timeout_secs: float = 30.0,
    ) -> None:
        self._path = f"{table_path(check_table(table))}/bulk"
        self._client = GatewayClient(url, token, timeout_secs=timeout_secs)
        self._batch_events, self._batch_bytes = batch_events, batch_bytes
        self._queue_events, self._queue_bytes = queue_events, queue_bytes
        self._linger_secs, self._delivery_secs = linger_secs, delivery_secs
        self._block = block
        self._key_prefix = f"{secrets.token_hex(8)}-"
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._open: Batch | None = None
        self._sealed: deque[Batch] = deque()
        self._accepted = self._settled = self._failed = self._bytes = 0
        self._failure: ZombiError | None = None
        self._closing = False
        self._abandoned = threading.Event()
        self._sender = threading.Thread(target=self._run, name="zombi-producer", daemon=True)
        self._sender.start()

    @property
    def acked(self) -> int:
        """Events the gateway has answered for."""
        return self._settled - self._failed

    @property
    def failed(self) -> int:
        return self._failed

    def send(
        self,
        payload: bytes | str,
        *,
        partition: int = 0,
        key: str | None = None,
        timestamp_ms: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Queue an event; without a time it happened now."""
        data = payload.encode() if isinstance(payload, str) else payload
        if not isinstance(data, bytes):
            raise InvalidRequestError(f"payload is {type(data).__name__}: give bytes or str")
        if partition:
            check_partition(partition)
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        size = EVENT_BYTES + len(data)
        if key:
            size += len(key)
        if headers:
            size += sum(len(name) + len(value) for name, value in headers.items())
        # The lock itself and no calls on the common way: this runs for every event.
        with self._lock:
            queued = self._accepted - self._settled
            if queued >= self._queue_events or self._bytes + size > self._queue_bytes:
                self._wait_for_room(size)
            batch = self._open
            if batch is None or batch.bytes + size > self._batch_bytes:
                batch = self._begin_batch()
            number = self._accepted = self._accepted + 1
            if key:
                batch.own_keys = False
            else:
                key = f"{self._key_prefix}{number}"
            batch.events.append((data, partition, timestamp_ms, key, headers))
            batch.bytes += size
            self._bytes += size
            if number - batch.first_number + 1 >= self._batch_events:
                self._seal()
        return Receipt(batch, number - batch.first_number)

    def flush(self, timeout: float | None = None) -> None:
        """Send what is queued and wait until it is answered; raise the first failure."""
        with self._lock:
            self._seal()
            upto = self._accepted
            if not self._changed.wait_for(lambda: self._settled >= upto, timeout):
                waiting = upto - self._settled
                raise TransientError(f"{waiting} events are not answered after {timeout:g} s")
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, timeout: float | None = None) -> None:
        """Flush and stop. What is not answered within `timeout` seconds is given up."""
        try:
            if not self._closing:
                self.flush(timeout)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The caller's side of the queue; all of it under the lock

    def _wait_for_room(self, size: int) -> None:
        if not self._block and not self._has_room(size):
            raise OverloadedError(
                f"{self._accepted - self._settled} events of {self._bytes} bytes are queued, at "
                f"most {self._queue_events} of {self._queue_bytes} may be; retry shortly"
            )
        self._changed.wait_for(lambda: self._closing or self._has_room(size))

    def _has_room(self, size: int) -> bool:
        """An event larger than the queue may be alone in it."""
        queued = self._accepted - self._settled
        return queued == 0 or (
            queued < self._queue_events and self._bytes + size <= self._queue_bytes
        )

    def _begin_batch(self) -> Batch:
        self._seal()
        if self._closing:
            raise TerminalError("the producer is closed and takes no more events")
        now = time.monotonic()
        self._open = Batch(self._accepted + 1, now + self._delivery_secs, now + self._linger_secs)
        self._changed.notify_all()
        return self._open

    def _seal(self) -> None:
        if self._open is not None:
            self._sealed.append(self._open)
            self._open = None
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
            self._seal()
            self._changed.notify_all()
        self._abandoned.set()
        # A request that is under way ends by its own timeout; nobody has to wait for it.
        self._sender.join(STOP_WAIT_SECS)

    # The sender's side

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._deliver(batch)
            except Exception as error:
                # Nobody else would see it, and callers would wait for ever.
                fault = TerminalError(f"the producer failed: {type(error).__name__}: {error}")
                fault.__cause__ = error
                batch.note(batch.noted, len(batch.events), fault)
            self._note(batch)
        self._client.close()

    def _next_batch(self) -> Batch | None:
        """The oldest batch that is due; none when the producer is closed and empty."""
        with self._lock:
            while not self._sealed:
                if self._open is None:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                wait = self._open.linger_until - time.monotonic()
                if wait <= 0:
                    self._seal()
                else:
                    self._changed.wait(wait)
            return self._sealed.popleft()

    def _note(self, batch: Batch) -> None:
        with self._lock:
            batch.settle()
            self._settled += batch.noted
            self._failed += batch.failed
            self._bytes -= batch.bytes
            self._failure = self._failure or batch.error()
            self._changed.notify_all()

    def _deliver(self, batch: Batch) -> None:
        """Post a batch; around an event that is rejected, the others are still sent."""
        pieces = [(0, len(batch.events))]
        rejections = 0
        while pieces:
            start, end = pieces.pop()
            try:
                answer = self._post(batch, start, end)
            except (InvalidRequestError, PayloadTooLargeError) as error:
                rejections += isinstance(error, InvalidRequestError)
                parts = _split(start, end, error) if rejections <= REJECTIONS_MAX else []
                if not parts:
                    batch.note(start, end, _named(error, batch.first_number + start, end - start))
                pieces += reversed(parts)
            except ZombiError as error:
                batch.note(start, end, error)
            else:
                batch.note(start, end, answer)

    def _post(self, batch: Batch, start: int, end: int) -> BulkAnswer:
        """One request, repeated while that may help and the batch has time left."""
        body = batch.encode(start, end)
        # Keys of our own are new, so their offsets follow one another; others may not.
        headers = _HEADERS_BRIEF if batch.own_keys else _HEADERS
        tries = 0
        while True:
            tries += 1
            try:
                if self._abandoned.is_set():
                    raise TransientError("the producer was closed before they were sent")
                response = self._client.request("POST", self._path, content=body, headers=headers)
                answer = decode(response, BulkAnswer)
                answer.check(end - start)
                return answer
            except TransientError as error:
                pause = max(_backoff_secs(tries), error.retry_after_secs)
                late = time.monotonic() + pause > batch.deadline
                if late or self._abandoned.wait(pause):
                    raise type(error)(
                        f"{end - start} events were given up after {tries} tries and may or may "
                        f"not be stored: {error}",
                        code=error.code,
                    ) from error


def _split(start: int, end: int, error: ZombiError) -> list[tuple[int, int]]:
    """Rows to try apart: around the record the error names, else halves of what is too large.

    The named one is tried alone too: it fails by itself or not at all.
    """
    if end - start == 1:
        return []
    if error.code in _TOO_MUCH_AT_ONCE:
        middle = (start + end) // 2
        return [(start, middle), (middle, end)]
    named = _NAMED_RECORD.match(str(error))
    if named is None or int(named[1]) >= end - start:
        return []
    bad = start + int(named[1])
    parts = [(start, bad), (bad, bad + 1), (bad + 1, end)]
    return [part for part in parts if part[0] < part[1]]


def _named(error: ZombiError, number: int, count: int) -> ZombiError:
    """The error with the event it is about, counted from 1 as they were sent."""
    if count > 1:
        return type(error)(f"events {number} to {number + count - 1}: {error}", code=error.code)
    text = _NAMED_RECORD.sub("", str(error), count=1)
    return type(error)(f"event {number}: {text}", code=error.code)


def _backoff_secs(tries: int) -> float:
    longest = min(RETRY_FIRST_SECS * 2.0 ** min(tries - 1, 16), RETRY_MOST_SECS)
    return longest * random.uniform(0.5, 1.0)
