"""Answers of hot reads: JSON pages and Arrow streams, both in bounded memory.

Payload bytes are never changed: what is not UTF-8 comes as base64. Everything here runs in
a reader thread, because it waits for the disk.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from zombi_platform.errors import InvalidRequestError, OverloadedError
from zombi_platform.events import COLUMNS
from zombi_platform.hot.buffer import Reading

JSON_LIMIT_MAX: Final = 10_000
ARROW_LIMIT_MAX: Final = 1_000_000
ARROW_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow stream: a message of no length."""
PAGE_BYTES_MAX: Final = 8 * 2**20
"""A JSON page ends early past this size, and says that there is more."""

SLICE_BYTES: Final = 256 * 2**10
"""Answers are handed to the connection in slices, so that it holds one and no more."""

_encode = msgspec.json.Encoder().encode


class OpenReads:
    """Reads under way or not yet taken by their reader, within a limit.

    A slow reader keeps its place until it has the answer or is cut off, so that answers in
    memory are bounded; threads are not held meanwhile, so that it delays nobody.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = 0

    def enter(self) -> None:
        if self._open >= self._limit:
            raise OverloadedError(
                f"{self._open} reads are open of {self._limit} at most "
                "(ZOMBI_MAX_OPEN_READS); retry shortly"
            )
        self._open += 1

    def leave(self) -> None:
        self._open -= 1


def slices(data: bytes | pa.Buffer) -> Iterator[memoryview]:
    view = memoryview(data)
    return (view[start : start + SLICE_BYTES] for start in range(0, len(view), SLICE_BYTES))


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    count: int


def parse_fields(text: str | None) -> list[str]:
    """The columns asked for, in the order of the table."""
    if text is None:
        return list(COLUMNS.names)
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in COLUMNS.names:
            raise InvalidRequestError(
                f"fields has {name[:40]!r}; there are {', '.join(COLUMNS.names)}"
            )
    return [name for name in COLUMNS.names if name in wanted]


def json_page(reading: Reading, fields: list[str]) -> Page:
    records: list[dict[str, Any]] = []
    size, has_more = 0, reading.has_more
    for batch in reading.batches:
        if size > PAGE_BYTES_MAX:
            has_more = True
            break
        records += _records(batch.select(fields))
        size += batch.nbytes
    body = _encode({"records": records, "count": len(records), "has_more": has_more})
    return Page(body, len(records))


def arrow_chunks(reading: Reading, fields: list[str]) -> Iterator[tuple[pa.Buffer, int]]:
    """Pieces of an Arrow stream, each with the number of records in it.

    Message by message and not through a stream writer, which would copy each batch once more.
    """
    yield pa.schema([COLUMNS.field(name) for name in fields]).serialize(), 0
    for batch in reading.batches:
        yield batch.select(fields).serialize(), batch.num_rows
    yield pa.py_buffer(ARROW_END), 0


def _records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    names = batch.schema.names
    columns = [column.to_pylist() for column in batch.columns]
    return [_record(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _record(values: Any) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in values:
        if name == "payload":
            try:
                record["payload"] = value.decode()
            except UnicodeDecodeError:
                record["payload_base64"] = base64.b64encode(value).decode()
        elif name == "headers":
            if value:
                record["headers"] = dict(value)
        elif value is not None:
            record[name] = value
    return record
