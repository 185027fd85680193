"""Bodies of write requests to segments, whatever they are written in.

Every decoder gives the same columns and raises `InvalidRequestError` that names the first
bad record by its index. A request is decoded whole before anything of it is stored. Here
are JSON and protobuf; `arrow_decoding` has Arrow.
"""

from __future__ import annotations

import base64
import binascii
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Meta

from zombi_platform.errors import InvalidRequestError, UnsupportedMediaError, ZombiError
from zombi_platform.events import (
    PARTITION_MAX,
    TIMESTAMP_MS_MAX,
    TIMESTAMP_MS_MIN,
    check_partition,
)
from zombi_platform.gateway import event_pb2 as generated
from zombi_platform.gateway.arrow_decoding import decode_arrow
from zombi_platform.gateway.records import (
    Decoded,
    Headers,
    check_count,
    check_headers,
    check_key,
    text_keys,
)
from zombi_platform.hot import HeaderColumns, Segment
from zombi_platform.hot.blocks import lengths_of

JSON: Final = b"application/json"
NDJSON: Final = b"application/x-ndjson"
PROTOBUF: Final = b"application/x-protobuf"
ARROW: Final = b"application/vnd.apache.arrow.stream"

# The generated module defines its messages at run time, out of sight of type checkers.
event_pb2: Any = generated


def _without(message: str, fields: set[str]) -> Any:
    """The class of a protobuf message as if it had been defined without some fields."""
    file = descriptor_pb2.FileDescriptorProto()
    event_pb2.DESCRIPTOR.CopyToProto(file)
    for defined in file.message_type:
        kept = [field for field in defined.field if field.name not in fields]
        defined.ClearField("field")
        defined.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message))


# What most bulks fit: a record's key and headers cost time to look for even where none are.
PlainBulkWriteRequest: Final = _without("zombi.BulkWriteRequest", {"idempotency_key", "headers"})

_I8: Final = struct.Struct("<q")
_U4: Final = struct.Struct("<I")

PartitionNumber = Annotated[int, Meta(ge=0, le=PARTITION_MAX)]
Timestamp = Annotated[int, Meta(ge=TIMESTAMP_MS_MIN, le=TIMESTAMP_MS_MAX)]

NO_TIMESTAMP: Final = -1
"""Below every timestamp that a request may bring."""


class Record(msgspec.Struct, gc=False):
    """One event in JSON."""

    payload: str | None = None
    partition: PartitionNumber = 0
    timestamp_ms: Timestamp | None = None
    idempotency_key: str | None = None
    payload_base64: str | None = None
    headers: Headers = None


class Bulk(msgspec.Struct, gc=False):
    records: list[Record]


class PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """One event in JSON with nothing special: what does not fit it, `Record` decides on."""

    payload: str
    partition: PartitionNumber = 0
    timestamp_ms: Timestamp = NO_TIMESTAMP


class PlainBulk(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    records: list[PlainRecord]


_single = msgspec.json.Decoder(Record)
_bulk = msgspec.json.Decoder(Bulk)
_plain_single = msgspec.json.Decoder(PlainRecord)
_plain_bulk = msgspec.json.Decoder(PlainBulk)


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
        headers = event.headers
        number = _partition_header(partition)
        key = event.idempotency_key
        return _one(event.payload, number, stamp, key, dict(headers) if headers else None)
    raise _unsupported(content_type, "application/json or application/x-protobuf")


def decode_bulk(content_type: bytes, body: bytes, limit: int) -> Decoded:
    """The events of a bulk request, of which there may be `limit`."""
    decoder = _BULK.get(content_type)
    if decoder is None:
        raise _unsupported(content_type, "application/json, x-ndjson, x-protobuf or Arrow stream")
    return decoder(body, limit)


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
        keys = [check_key(key.encode(), None)]
    return Segment(
        partition,
        1,
        stamp,
        stamp,
        _I8.pack(stamp),
        _U4.pack(len(payload)),
        payload,
        keys,
        HeaderColumns.of([headers]) if headers and check_headers([headers]) else None,
    )


def _bulk_json(body: bytes, limit: int) -> Decoded:
    try:
        records = _plain_bulk.decode(body).records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _from_records(_decode_json(_bulk.decode, body).records, limit)
    return _from_plain(records, limit)


def _bulk_ndjson(body: bytes, limit: int) -> Decoded:
    try:
        return _from_plain(_plain_single.decode_lines(body), limit)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        records = _single.decode_lines(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        records = []
        for line in body.splitlines():
            if line.strip():
                records.append(_at(len(records), _decode_json, _single.decode, line))
    return _from_records(records, limit)


def _from_plain(records: list[PlainRecord], limit: int) -> Decoded:
    check_count(len(records), limit)
    # Records go to their partitions before they become columns: one pass instead of a take
    # for each column.
    members: defaultdict[int, list[PlainRecord]] = defaultdict(list)
    for record in records:
        members[record.partition].append(record)
    segments = [_plain_segment(partition, found) for partition, found in members.items()]
    places = None if len(segments) == 1 else [record.partition for record in records]
    return segments, places


def _plain_segment(partition: int, records: list[PlainRecord]) -> Segment:
    stamps = [record.timestamp_ms for record in records]
    if min(stamps) < 0:
        now = now_ms()
        stamps = [now if stamp == NO_TIMESTAMP else stamp for stamp in stamps]
    return _segment(partition, [record.payload for record in records], stamps)


def _from_records(records: list[Record], limit: int) -> Decoded:
    check_count(len(records), limit)
    texts = [record.payload for record in records]
    encoded: list[bytes] | None = None
    if None in texts or any(record.payload_base64 is not None for record in records):
        encoded = [_payload_of(record, index) for index, record in enumerate(records)]
    stamps = [record.timestamp_ms for record in records]
    if None in stamps:
        now = now_ms()
        stamps = [now if stamp is None else stamp for stamp in stamps]
    keys = text_keys([record.idempotency_key for record in records])
    headers = check_headers([record.headers for record in records])
    partitions = [record.partition for record in records]
    return _split(partitions, texts if encoded is None else encoded, stamps, keys, headers)


_timestamp_of = attrgetter("timestamp_ms")
_partition_of = attrgetter("partition")
_payload = attrgetter("payload")
_key_of = attrgetter("idempotency_key")


def _bulk_protobuf(body: bytes, limit: int) -> Decoded:
    keys = headers = None
    request = PlainBulkWriteRequest()
    _parse_protobuf(request, body)
    request.DiscardUnknownFields()
    # Nothing encodes the same fields in fewer bytes: of the same size, it is all there.
    if plain := request.ByteSize() == len(body):
        records = list(request.records)
    else:
        request = event_pb2.BulkWriteRequest()
        _parse_protobuf(request, body)
        # A list, because the container makes new objects each time it is walked.
        records = list(request.records)
    check_count(len(records), limit)
    stamps = list(map(_timestamp_of, records))
    if min(stamps) <= 0 or max(stamps) > TIMESTAMP_MS_MAX:
        now = now_ms()
        stamps = [now if s == 0 else _proto_timestamp(s, i) or now for i, s in enumerate(stamps)]
    if not plain:
        keys = text_keys(list(map(_key_of, records)))
        headers = check_headers([dict(r.headers) if r.headers else None for r in records])
    partitions, payloads = list(map(_partition_of, records)), list(map(_payload, records))
    return _split(partitions, payloads, stamps, keys, headers)


def _split(
    partitions: list[int],
    payloads: Sequence[Any],
    stamps: Sequence[Any],
    keys: list[bytes] | None,
    headers: list[Headers] | None,
) -> Decoded:
    """Columns of a request as one segment for each partition."""
    if partitions.count(partitions[0]) == len(partitions):
        return [_segment(partitions[0], payloads, stamps, keys, headers)], None
    members: defaultdict[int, list[int]] = defaultdict(list)
    for row, partition in enumerate(partitions):
        members[partition].append(row)
    segments = [
        _segment(
            partition,
            [payloads[row] for row in rows],
            [stamps[row] for row in rows],
            None if keys is None else [keys[row] for row in rows],
            None if headers is None else [headers[row] for row in rows],
        )
        for partition, rows in members.items()
    ]
    return segments, partitions


def _segment(
    partition: int,
    payloads: Sequence[Any],
    stamps: Sequence[int],
    keys: list[bytes] | None = None,
    headers: list[Headers] | None = None,
) -> Segment:
    """Payloads are all text or all bytes; ASCII text is encoded in one go."""
    if isinstance(payloads[0], str):
        joined = "".join(payloads)
        data = joined.encode()
        if len(data) != len(joined):
            payloads = [payload.encode() for payload in payloads]
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
        HeaderColumns.of(headers) if headers is not None and any(headers) else None,
    )


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


def _at(index: int, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ZombiError as error:
        raise InvalidRequestError(f"record {index}: {error}") from error


def _unsupported(content_type: bytes, wanted: str) -> UnsupportedMediaError:
    return UnsupportedMediaError(f"content type {content_type[:80]!r} is not taken: use {wanted}")


_BULK: Final[Mapping[bytes, Callable[[bytes, int], Decoded]]] = {
    JSON: _bulk_json,
    NDJSON: _bulk_ndjson,
    PROTOBUF: _bulk_protobuf,
    ARROW: decode_arrow,
}
