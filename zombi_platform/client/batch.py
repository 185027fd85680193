"""Events that travel together: columns while they wait, outcomes once they are answered.

A batch becomes an Arrow stream: of the gateway's formats it costs the sender and the gateway
least CPU, and it takes any bytes. Its payloads are dropped when it is settled; what stays is
what a receipt needs to tell where its event went.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa

from zombi_platform.errors import InvalidRequestError, TerminalError, ZombiError
from zombi_platform.events import HEADERS_TYPE

EVENT_BYTES: Final = 64
"""What an event is taken to cost besides its payload, key and headers."""

_COLUMNS: Final = pa.schema(
    [
        ("payload", pa.binary()),
        ("partition", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("idempotency_key", pa.string()),
    ]
)
_WITH_HEADERS: Final = _COLUMNS.append(pa.field("headers", HEADERS_TYPE))

_MISFITS: Final = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)
"""What values of a wrong type or out of a column's range raise on their way to Arrow."""


class Placed(NamedTuple):
    """Where an event is."""

    partition: int
    offset: int


class Span(msgspec.Struct, frozen=True):
    first: int
    last: int


class BulkAnswer(msgspec.Struct):
    """Of a bulk write: `offsets` in record order, or `partitions` when asked to be brief."""

    count: int
    offsets: list[int] | None = None
    partitions: dict[str, Span] | None = None

    def check(self, count: int) -> None:
        """Raise unless it answers for as many events."""
        if self.offsets is not None:
            found = len(self.offsets)
        else:
            found = sum(span.last - span.first + 1 for span in (self.partitions or {}).values())
        if self.count != count or found != count:
            raise TerminalError(
                f"the gateway answered for {self.count} events with {found} offsets; {count} were "
                "sent: client and gateway do not fit together"
            )


Row = tuple[bytes, int, int, str, Mapping[str, str] | None]
"""Payload, partition, time, key and headers of an event."""


class Batch:
    """Filled by callers under the producer's lock, settled once by its sender."""

    def __init__(self, first_number: int, deadline: float, linger_until: float) -> None:
        self.first_number = first_number
        self.deadline = deadline
        self.linger_until = linger_until
        self.events: list[Row] = []
        self.bytes = 0
        self.own_keys = True
        self.noted = 0
        self.failed = 0
        self.settled = threading.Event()
        self._partitions: list[int] = []
        self._pieces: list[tuple[int, int, BulkAnswer | ZombiError]] = []
        self._outcomes: list[int | ZombiError] | None = None

    def encode(self, start: int, end: int) -> bytes:
        """The rows from `start` to before `end` as the body of a bulk write."""
        try:
            columns = _columns(self.events[start:end])
        except _MISFITS as error:
            row = next((row for row in range(start, end) if not _fits(self.events[row])), start)
            raise InvalidRequestError(f"record {row - start}: {error}") from error
        schema = _COLUMNS if len(columns) == len(_COLUMNS) else _WITH_HEADERS
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        body: bytes = sink.getvalue().to_pybytes()
        return body

    def note(self, start: int, end: int, outcome: BulkAnswer | ZombiError) -> None:
        """Keep what became of the rows from `start` to before `end`; they come in order."""
        self._pieces.append((start, end, outcome))
        self.noted = end
        if isinstance(outcome, ZombiError):
            self.failed += end - start

    def settle(self) -> None:
        """Every row has an outcome: let go of the events and of whoever waits."""
        self._partitions = [event[1] for event in self.events]
        self.events = []
        self.settled.set()

    def error(self) -> ZombiError | None:
        """The first failure, if there is one."""
        found = (outcome for _, _, outcome in self._pieces if isinstance(outcome, ZombiError))
        return next(found, None)

    def placed(self, row: int) -> Placed:
        """Where a row went; raises what it failed with."""
        if self._outcomes is None:
            self._outcomes = self._resolve()
        outcome = self._outcomes[row]
        if isinstance(outcome, ZombiError):
            raise outcome
        return Placed(self._partitions[row], outcome)

    def _resolve(self) -> list[int | ZombiError]:
        outcomes: list[int | ZombiError] = []
        for start, end, outcome in self._pieces:
            if isinstance(outcome, ZombiError):
                outcomes += [outcome] * (end - start)
            elif outcome.offsets is not None:
                outcomes += outcome.offsets
            else:
                outcomes += _count_up(self._partitions[start:end], outcome.partitions or {})
        return outcomes


def _columns(events: list[Row]) -> list[pa.Array]:
    payloads, partitions, stamps, keys, headers = zip(*events, strict=True)
    columns = [
        pa.array(payloads, pa.binary()),
        pa.array(partitions, pa.int64()),
        pa.array(stamps, pa.int64()),
        pa.array(keys, pa.string()),
    ]
    if any(headers):
        pairs = [list(entry.items()) if entry else None for entry in headers]
        columns.append(pa.array(pairs, HEADERS_TYPE))
    return columns


def _fits(event: Row) -> bool:
    try:
        _columns([event])
    except _MISFITS:
        return False
    return True


def _count_up(partitions: list[int], ranges: Mapping[str, Span]) -> list[int]:
    following = {int(number): span.first for number, span in ranges.items()}
    offsets = []
    for partition in partitions:
        offsets.append(following[partition])
        following[partition] += 1
    return offsets
