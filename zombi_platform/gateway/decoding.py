"""Bodies of write requests to segments, whatever they are written in.

Every decoder gives the same columns and raises `InvalidRequestError` that names the first
bad record by its index. A request is decoded whole before anything of it is stored.
"""

from __future__ import annotations

import base64
import binascii
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from msgspec import Meta

from zombi_platform.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedMediaError,
    ZombiError,
)
from zombi_platform.events import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    HEADERS_TYPE,
    IDEMPOTENCY_KEY_BYTES_MAX,
    PARTITION_MAX,
    TIMESTAMP_MS_MAX,
    TIMESTAMP_MS_MIN,
    check_partition,
)
from zombi_platform.gateway import event_pb2 as generated
from zombi_platform.hot import HeaderColumns, Segment
from zombi_platform.hot.blocks import lengths_of

JSON: Final = b"application/json"
NDJSON: Final = b"application/x-ndjson"
PROTOBUF: Final = b"application/x-protobuf"
ARROW: Final = b"application/vnd.apache.arrow.stream"

# The generated module defines its messages at run time, out of sight of type checkers.
event_pb2: Any = generated

_I8: Final = struct.Struct("<q")
_U4: Final = struct.Struct("<I")

Headers = dict[str, str] | None


class Record(msgspec.Struct, gc=False):
    """One event in JSON."""

    payload: str | None = None
    partition: Annotated[int, Meta(ge=0, le=PARTITION_MAX)] = 0
    timestamp_ms: Annotated[int, Meta(ge=TIMESTAMP_MS_MIN, le=TIMESTAMP_MS_MAX)] | None = None
    idempotency_key: str | None = None
    payload_base64: str | None = None
    headers: Headers = None


class Bulk(msgspec.Struct, gc=False):
    records: list[Record]


_single = msgspec.json.Decoder(Record)
_bulk = msgspec.json.Decoder(Bulk)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def decode_single(content_type: bytes, body: bytes, partition: bytes | None) -> Segment:
    """One event; `partition` is the X-Partition header, which only protobuf uses."""
    if content_type == JSON:
        record = _decode_json(_single.decode, body)
        payload = record.payload.encode() if record.payload is not None else None
        if payload is None or record.payload_base64 is not None:
            payload = _payload_of(record, None)
        return _one(
            payload, record.partition, record.timestamp_ms, record.idempotency_key, record.headers
        )
    if content_type == PROTOBUF:
        event = event_pb2.Event()
        _parse_protobuf(event, body)
        stamp = _proto_timestamp(event.timestamp_ms, None)
        headers = dict(event.headers)
        number = _partition_header(partition)
        return _one(event.payload, number, stamp, event.idempotency_key, headers)
    raise _unsupported(content_type, "application/json or application/x-protobuf")


def decode_bulk(content_type: bytes, body: bytes, limit: int) -> tuple[list[Segment], list[Any]]:
    """The segments of a bulk request, and for each the rows of the request it holds."""
    decoder = _BULK.get(content_type)
    if decoder is None:
        raise _unsupported(content_type, "application/json, x-ndjson, x-protobuf or Arrow stream")
    decoded = decoder(body, limit)
    return [s for s, _ in decoded], [r for _, r in decoded]


def _decode_json(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the JSON does not fit: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the JSON is nested too deeply") from error


def _one(
    payload: bytes, partition: int, stamp: int | None, key: str | None, headers: Headers
) -> Segment:
    if stamp is None:
        stamp = now_ms()
    keys = None
    if key:
        keys = [_check_key(key.encode(), None)]
    return Segment(
        partition,
        1,
        stamp,
        stamp,
        _I8.pack(stamp),
        _U4.pack(len(payload)),
        payload,
        keys,
        _header_columns([headers]) if headers else None,
    )


def _bulk_json(body: bytes, limit: int) -> list[tuple[Segment, Any]]:
    return _from_records(_decode_json(_bulk.decode, body).records, limit)


def _bulk_ndjson(body: bytes, limit: int) -> list[tuple[Segment, Any]]:
    try:
        records = _single.decode_lines(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        records = []
        for line in body.splitlines():
            if line.strip():
                records.append(_at(len(records), _decode_json, _single.decode, line))
    return _from_records(records, limit)


def _from_records(records: list[Record], limit: int) -> list[tuple[Segment, Any]]:
    _check_count(len(records), limit)
    texts = [record.payload for record in records]
    encoded: list[bytes] | None = None
    if None in texts or any(record.payload_base64 is not None for record in records):
        encoded = [_payload_of(record, index) for index, record in enumerate(records)]
    stamps = [record.timestamp_ms for record in records]
    if None in stamps:
        now = now_ms()
        stamps = [now if stamp is None else stamp for stamp in stamps]
    keys = _text_keys([record.idempotency_key for record in records])
    headers: list[Headers] | None = [record.headers for record in records]
    if not any(headers or ()):
        headers = None
    partitions = [record.partition for record in records]
    return _split(partitions, texts if encoded is None else encoded, stamps, keys, headers)


def _bulk_protobuf(body: bytes, limit: int) -> list[tuple[Segment, Any]]:
    request = event_pb2.BulkWriteRequest()
    _parse_protobuf(request, body)
    records = request.records
    _check_count(len(records), limit)
    stamps = [record.timestamp_ms for record in records]
    if min(stamps) <= 0 or max(stamps) > TIMESTAMP_MS_MAX:
        now = now_ms()
        stamps = [now if s == 0 else _proto_timestamp(s, i) or now for i, s in enumerate(stamps)]
    keys = _text_keys([record.idempotency_key for record in records])
    headers: list[Headers] | None = [
        dict(record.headers) if record.headers else None for record in records
    ]
    if not any(headers or ()):
        headers = None
    return _split(
        [record.partition for record in records],
        [record.payload for record in records],
        stamps,
        keys,
        headers,
    )


def _split(
    partitions: list[int],
    payloads: Sequence[Any],
    stamps: Sequence[Any],
    keys: list[bytes] | None,
    headers: list[Headers] | None,
) -> list[tuple[Segment, Any]]:
    """Columns of a request as one segment for each partition."""
    if partitions.count(partitions[0]) == len(partitions):
        rows = range(len(partitions))
        return [(_segment(partitions[0], payloads, stamps, keys, headers), rows)]
    places: dict[int, list[int]] = {}
    for row, partition in enumerate(partitions):
        place = places.get(partition)
        if place is None:
            place = places[partition] = []
        place.append(row)
    return [
        (
            _segment(
                partition,
                [payloads[row] for row in rows],
                [stamps[row] for row in rows],
                None if keys is None else [keys[row] for row in rows],
                None if headers is None else [headers[row] for row in rows],
            ),
            rows,
        )
        for partition, rows in places.items()
    ]


def _segment(
    partition: int,
    payloads: Sequence[Any],
    stamps: Sequence[int],
    keys: list[bytes] | None,
    headers: list[Headers] | None,
) -> Segment:
    """Payloads are all text or all bytes; ASCII text is encoded in one go."""
    if isinstance(payloads[0], str):
        joined = "".join(payloads)
        if joined.isascii():
            data = joined.encode()
        else:
            payloads = [payload.encode() for payload in payloads]
            data = b"".join(payloads)
    else:
        data = b"".join(payloads)
    return Segment(
        partition,
        len(payloads),
        min(stamps),
        max(stamps),
        struct.pack(f"<{len(stamps)}q", *stamps),
        lengths_of(payloads),
        data,
        keys if keys is not None and any(keys) else None,
        _header_columns(headers) if headers is not None and any(headers) else None,
    )


def _bulk_arrow(body: bytes, limit: int) -> list[tuple[Segment, Any]]:
    try:
        with pa.ipc.open_stream(body) as reader:
            table = reader.read_all()
        table.validate(full=True)
        table = table.combine_chunks()
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise InvalidRequestError(f"the body is not a valid Arrow stream: {error}") from error
    _check_count(table.num_rows, limit)
    unknown = set(table.column_names) - _ARROW_TYPES.keys()
    if "payload" not in table.column_names or unknown:
        raise InvalidRequestError(
            f"Arrow columns {table.column_names} do not fit: payload is needed; partition, "
            "timestamp_ms, idempotency_key and headers may come with it"
        )
    columns = {name: _arrow_column(table, name) for name in table.column_names}
    return _from_arrow(columns, table.num_rows)


_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    "payload": pa.large_binary(),
    "partition": pa.int64(),
    "timestamp_ms": pa.int64(),
    "idempotency_key": pa.string(),
    "headers": HEADERS_TYPE,
}


def _arrow_column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    wanted = _ARROW_TYPES[name]
    try:
        if name == "payload" and pa.types.is_string(array.type):
            array = array.cast(pa.binary())
        elif name == "payload" and pa.types.is_large_string(array.type):
            array = array.cast(pa.large_binary())
        return array if array.type == wanted else array.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"Arrow column {name!r} of type {array.type}: {error}") from error


def _from_arrow(columns: dict[str, pa.Array], count: int) -> list[tuple[Segment, Any]]:
    payload = columns["payload"]
    if payload.null_count:
        row = pc.index(payload.is_null(), True).as_py()
        raise InvalidRequestError(f"record {row}: payload is null")
    partitions = _numbers(columns.get("partition"), count, 0, "partition", 0, PARTITION_MAX)
    stamps = _numbers(
        columns.get("timestamp_ms"),
        count,
        now_ms(),
        "timestamp_ms",
        TIMESTAMP_MS_MIN,
        TIMESTAMP_MS_MAX,
    )
    keys = headers = None
    if "idempotency_key" in columns and columns["idempotency_key"].null_count < count:
        keys = _text_keys(columns["idempotency_key"].to_pylist())
    if "headers" in columns and columns["headers"].null_count < count:
        headers = [dict(entry) if entry else None for entry in columns["headers"].to_pylist()]
    found = []
    for partition in np.unique(partitions).tolist():
        places = np.flatnonzero(partitions == partition)
        rows = places.tolist()
        whole = len(rows) == count
        part = payload if whole else payload.take(pa.array(places))
        chosen = stamps if whole else stamps[places]
        offsets = np.frombuffer(part.buffers()[1], np.int64)[part.offset :][: len(rows) + 1]
        data = part.buffers()[2]
        found.append(
            (
                Segment(
                    partition,
                    len(rows),
                    int(chosen.min()),
                    int(chosen.max()),
                    chosen.astype("<i8").tobytes(),
                    np.diff(offsets).astype("<u4").tobytes(),
                    b"" if data is None else bytes(memoryview(data)[offsets[0] : offsets[-1]]),
                    None if keys is None else [keys[row] for row in rows],
                    None if headers is None else _header_columns([headers[row] for row in rows]),
                ),
                rows,
            )
        )
    return found


def _numbers(
    array: pa.Array | None, count: int, missing: int, name: str, low: int, high: int
) -> Any:
    if array is None:
        return np.full(count, missing, dtype=np.int64)
    if array.null_count:
        array = array.fill_null(missing)
    values = array.to_numpy(zero_copy_only=False)
    if values.min() < low or values.max() > high:
        row = int(np.flatnonzero((values < low) | (values > high))[0])
        raise InvalidRequestError(
            f"record {row}: {name} {values[row]} is out of range, it must be {low} to {high}"
        )
    return values


def _payload_of(record: Record, index: int | None) -> bytes:
    where = "" if index is None else f"record {index}: "
    if (record.payload is None) == (record.payload_base64 is None):
        raise InvalidRequestError(f"{where}give either payload or payload_base64")
    if record.payload is not None:
        return record.payload.encode()
    try:
        return base64.b64decode(record.payload_base64 or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{where}payload_base64 is not base64: {error}") from error


def _text_keys(keys: Sequence[str | None]) -> list[bytes] | None:
    if not any(keys):
        return None
    return [_check_key((key or "").encode(), index) for index, key in enumerate(keys)]


def _check_key(key: bytes, index: int | None) -> bytes:
    if len(key) > IDEMPOTENCY_KEY_BYTES_MAX:
        where = "" if index is None else f"record {index}: "
        raise InvalidRequestError(
            f"{where}idempotency_key has {len(key)} bytes, at most {IDEMPOTENCY_KEY_BYTES_MAX} fit"
        )
    return key


def _header_columns(headers: Sequence[Headers]) -> HeaderColumns:
    for index, entry in enumerate(headers):
        if not entry:
            continue
        size = sum(len(name) + len(value) for name, value in entry.items())
        if len(entry) > HEADERS_MAX or size > HEADERS_BYTES_MAX:
            raise InvalidRequestError(
                f"record {index}: {len(entry)} headers of {size} characters; at most "
                f"{HEADERS_MAX} of {HEADERS_BYTES_MAX} fit"
            )
    return HeaderColumns.of(headers)


def _parse_protobuf(message: Any, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"the body is not a valid protobuf message: {error}") from error


def _proto_timestamp(stamp: int, index: int | None) -> int | None:
    if stamp == 0:
        return None
    if not TIMESTAMP_MS_MIN <= stamp <= TIMESTAMP_MS_MAX:
        where = "" if index is None else f"record {index}: "
        raise InvalidRequestError(f"{where}timestamp_ms {stamp} is not within 1970 to 9999")
    return stamp


def _partition_header(value: bytes | None) -> int:
    if value is None:
        return 0
    if not value.isdigit() or len(value) > 10:
        raise InvalidRequestError(f"X-Partition {value[:40]!r} is not a partition number")
    return check_partition(int(value))


def _check_count(count: int, limit: int) -> None:
    if count == 0:
        raise InvalidRequestError("the request has no records")
    if count > limit:
        raise PayloadTooLargeError(
            f"{count} records are more than {limit} (ZOMBI_MAX_BULK_RECORDS); send smaller batches",
            code="TOO_MANY_RECORDS",
        )


def _at(index: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ZombiError as error:
        raise InvalidRequestError(f"record {index}: {error}") from error


def _unsupported(content_type: bytes, wanted: str) -> UnsupportedMediaError:
    return UnsupportedMediaError(f"content type {content_type[:80]!r} is not taken: use {wanted}")


_BULK: Final[Mapping[bytes, Callable[[bytes, int], list[tuple[Segment, Any]]]]] = {
    JSON: _bulk_json,
    NDJSON: _bulk_ndjson,
    PROTOBUF: _bulk_protobuf,
    ARROW: _bulk_arrow,
}
