"""Lines of text to events: what `zombi send` reads.

A line is either a record of the API's shape or a payload as it stands; both become an
`Outgoing` with its partition and key. The same line at the same place of the same input
always gets the same partition and, given a prefix, the same key, so that sending a file
twice can be harmless. Every complaint names the line.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal

import msgspec

from zombi_platform.errors import InvalidRequestError

LINE_BYTES_MAX: Final = 16 * 2**20
"""The gateway's default limit for a body; what is longer could not be sent."""

Shape = Literal["records", "lines"]


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """An event in the API's shape. `sequence` is allowed so that `zombi tail --json` fits."""

    payload: str | None = None
    payload_base64: bytes | None = None
    partition: int | None = None
    timestamp_ms: int | None = None
    idempotency_key: str | None = None
    headers: dict[str, str] | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    payload: bytes
    partition: int
    key: str | None = None
    timestamp_ms: int | None = None
    headers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Addressing:
    """Where events go that do not say so themselves, and the keys of those that have none."""

    partition: int = 0
    partitions: int | None = None
    key_field: str | None = None
    key_prefix: str | None = None

    def key(self, number: int, payload: bytes) -> str | None:
        if self.key_field is not None:
            return _field(payload, self.key_field)
        return None if self.key_prefix is None else f"{self.key_prefix}:{number}"

    def place(self, number: int, key: str | None) -> int:
        """By the key's hash where there is one, else in turn."""
        if self.partitions is None:
            return self.partition
        turn = number - 1 if key is None else zlib.crc32(key.encode())
        return turn % self.partitions


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, without their ends, numbered from 1."""
    number = 0
    while line := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise InvalidRequestError(f"line {number}: it is longer than {LINE_BYTES_MAX} bytes")
        if line := line.rstrip(b"\r\n"):
            yield number, line


def detect(line: bytes) -> Shape:
    """Records if this line is an object with a payload and only fields of the API's record."""
    try:
        _payload(msgspec.json.decode(line, type=Record))
    except (msgspec.DecodeError, InvalidRequestError, RecursionError):
        return "lines"
    return "records"


def outgoing(number: int, line: bytes, shape: Shape, addressing: Addressing) -> Outgoing:
    """The event of a line; raises with the line's number."""
    try:
        record = _decode(line) if shape == "records" else None
        payload = line if record is None else _payload(record)
        key = (record and record.idempotency_key) or addressing.key(number, payload)
        if record is None:
            return Outgoing(payload, addressing.place(number, key), key)
        partition = record.partition
        if partition is None:
            partition = addressing.place(number, key)
        return Outgoing(payload, partition, key, record.timestamp_ms, record.headers)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"line {number}: {error}", code=error.code) from error


def _decode(line: bytes) -> Record:
    try:
        return msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"it is not a record: {error}; with --format lines it would be sent as it is"
        ) from error


def _payload(record: Record) -> bytes:
    if (record.payload is None) == (record.payload_base64 is None):
        raise InvalidRequestError("give either payload or payload_base64")
    return record.payload_base64 or b"" if record.payload is None else record.payload.encode()


def _field(payload: bytes, name: str) -> str:
    try:
        value = msgspec.json.decode(payload, type=dict[str, msgspec.Raw]).get(name)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"--key-field {name} needs a JSON object as payload: {error}"
        ) from error
    key = None if value is None else msgspec.json.decode(value)
    if not isinstance(key, str | int) or key == "" or isinstance(key, bool):
        raise InvalidRequestError(
            f"--key-field {name}: the payload's {name!r} is {key!r}; a text or whole number is "
            "needed"
        )
    return str(key)
