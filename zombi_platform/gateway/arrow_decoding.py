"""Arrow bulk requests to segments, in whole columns: no Python object is made for an event.

The stream is validated in full before a buffer of it is touched, so offsets that point
outside their data are refused, not followed. Only plain types are taken, uncompressed: then
no stream decodes to more than its own size, as dictionaries, views and compressed buffers do.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zombi_platform.errors import InvalidRequestError
from zombi_platform.events import (
    HEADERS_TYPE,
    PARTITION_MAX,
    TIMESTAMP_MS_MAX,
    TIMESTAMP_MS_MIN,
)
from zombi_platform.gateway.records import (
    Decoded,
    Headers,
    check_count,
    check_headers,
    text_keys,
)
from zombi_platform.hot import HeaderColumns, Segment

NARROW: Final = (pa.binary(), pa.string())
WIDE: Final = (pa.large_binary(), pa.large_string())
INTEGERS: Final = tuple(
    kind()
    for kind in (
        *(pa.int8, pa.int16, pa.int32, pa.int64),
        *(pa.uint8, pa.uint16, pa.uint32, pa.uint64),
    )
)
COLUMN_TYPES: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "payload": NARROW + WIDE,
    "partition": INTEGERS,
    "timestamp_ms": (*INTEGERS, pa.timestamp("ms"), pa.timestamp("ms", "UTC")),
    "idempotency_key": (pa.string(), pa.large_string()),
    "headers": (HEADERS_TYPE,),
}

# Where Arrow's flatbuffers keep things: the header of a message is its table's third field,
# and the fourth field of a record batch says how its buffers are compressed.
_HEADER_FIELD: Final = 4 + 2 * 2
_COMPRESSION_FIELD: Final = 4 + 2 * 3

SCHEMAS_MAX: Final = 64
"""Schemas remembered."""
SCHEMA_BYTES_MAX: Final = 64 * 1024

_FIRST_ROW: Final = np.zeros(1, dtype=np.intp)


def decode_arrow(body: bytes, limit: int) -> Decoded:
    """The events of an Arrow IPC stream, of which there may be `limit`."""
    try:
        batch = _read_batch(body)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, LookupError, struct.error) as error:
        raise InvalidRequestError(f"the body is not a valid Arrow stream: {error}") from error
    check_count(batch.num_rows, limit)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    return _from_columns(columns, batch.num_rows)


def _read_batch(body: bytes) -> pa.RecordBatch:
    """All record batches of the stream as one."""
    first, *others = pa.ipc.MessageReader.open_stream(body)
    if first.metadata.size > SCHEMA_BYTES_MAX:
        raise InvalidRequestError(
            f"the Arrow schema has {first.metadata.size} bytes, at most {SCHEMA_BYTES_MAX} fit"
        )
    schema = _read_schema(first.serialize().to_pybytes())
    _check_messages(others)
    batches = [pa.ipc.read_record_batch(message, schema) for message in others]
    if len(batches) == 1:
        return batches[0]
    for batch in batches:
        batch.validate(full=True)
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return (table.to_batches() or [pa.RecordBatch.from_pylist([], schema)])[0]


@lru_cache(SCHEMAS_MAX)
def _read_schema(message: bytes) -> pa.Schema:
    """The schema if it fits; producers send the same one over and over."""
    schema = pa.ipc.read_schema(pa.py_buffer(message))
    _check_schema(schema)
    return schema


def _check_messages(messages: list[pa.ipc.Message]) -> None:
    """Refuse what could decode to more than the body before anything decodes it."""
    for message in messages:
        if message.type != "record batch":
            raise InvalidRequestError(f"Arrow messages of type {message.type} are not taken")
        if _is_compressed(memoryview(message.metadata)):
            raise InvalidRequestError(
                "compressed Arrow buffers are not taken: write the stream without compression "
                "and compress the body instead (Content-Encoding: zstd)"
            )


def _is_compressed(metadata: memoryview) -> bool:
    root = _read_u32(metadata, 0)
    header = _follow(metadata, root, _HEADER_FIELD)
    return header is not None and _follow(metadata, header, _COMPRESSION_FIELD) is not None


def _follow(data: memoryview, table: int, field: int) -> int | None:
    """Where a flatbuffer table's field points to; None if it is not set."""
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    if field >= int(struct.unpack_from("<H", data, fields)[0]):
        return None
    place = int(struct.unpack_from("<H", data, fields + field)[0])
    return table + place + _read_u32(data, table + place) if place else None


def _read_u32(data: memoryview, place: int) -> int:
    return int(struct.unpack_from("<I", data, place)[0])


def _check_schema(schema: pa.Schema) -> None:
    names = schema.names
    if "payload" not in names or len(set(names)) < len(names) or set(names) - COLUMN_TYPES.keys():
        raise InvalidRequestError(
            f"Arrow columns {names[:20]} do not fit: payload is needed; partition, timestamp_ms, "
            "idempotency_key and headers may come with it"
        )
    for field in schema:
        if field.type not in COLUMN_TYPES[field.name]:
            wanted = ", ".join(str(kind) for kind in COLUMN_TYPES[field.name])
            raise InvalidRequestError(
                f"Arrow column {field.name!r} of type {field.type} is not taken: use {wanted}"
            )


def _from_columns(columns: dict[str, pa.Array], count: int) -> Decoded:
    payload = columns["payload"]
    if payload.null_count:
        row = pc.index(payload.is_null(), True).as_py()
        raise InvalidRequestError(f"record {row}: payload is null")
    partitions = _integers(columns, "partition", count, 0, 0, PARTITION_MAX)
    now = time.time_ns() // 1_000_000
    stamps = _integers(columns, "timestamp_ms", count, now, TIMESTAMP_MS_MIN, TIMESTAMP_MS_MAX)
    keys, headers = _keys(columns, count), _headers(columns, count)
    if (partitions == partitions[0]).all():
        return _segments(partitions, payload, stamps, keys, headers), None
    order = np.argsort(partitions, kind="stable")
    rows = [] if keys is None and headers is None else order.tolist()
    segments = _segments(
        partitions[order],
        payload.take(pa.array(order)),
        stamps[order],
        None if keys is None else [keys[row] for row in rows],
        None if headers is None else [headers[row] for row in rows],
    )
    return segments, partitions


def _segments(
    partitions: npt.NDArray[Any],
    payload: pa.Array,
    stamps: npt.NDArray[Any],
    keys: list[bytes] | None,
    headers: list[Headers] | None,
) -> list[Segment]:
    """One segment for each run of rows with the same partition."""
    width = np.int64 if payload.type in WIDE else np.int32
    _, offsets_buffer, data = payload.buffers()
    offsets = np.frombuffer(offsets_buffer, width)[payload.offset :][: len(payload) + 1]
    changes = np.flatnonzero(partitions[1:] != partitions[:-1]) + 1
    starts = np.concatenate((_FIRST_ROW, changes))
    bounds = [*starts.tolist(), len(partitions)]
    numbers, cuts = partitions[starts].tolist(), [*offsets[starts].tolist(), int(offsets[-1])]
    lows = np.minimum.reduceat(stamps, starts).tolist()
    highs = np.maximum.reduceat(stamps, starts).tolist()
    timestamps = stamps.astype("<i8", copy=False).tobytes()
    lengths = np.diff(offsets).astype("<u4", copy=False).tobytes()
    payloads = memoryview(data or b"")
    return [
        Segment(
            numbers[i],
            end - start,
            lows[i],
            highs[i],
            timestamps[8 * start : 8 * end],
            lengths[4 * start : 4 * end],
            payloads[cuts[i] : cuts[i + 1]].tobytes(),
            None if keys is None or not any(keys[start:end]) else keys[start:end],
            None if headers is None else _header_columns(headers[start:end]),
        )
        for i, (start, end) in enumerate(pairwise(bounds))
    ]


def _integers(
    columns: dict[str, pa.Array], name: str, count: int, missing: int, low: int, high: int
) -> npt.NDArray[Any]:
    array = columns.get(name)
    if array is None:
        return np.full(count, missing, dtype=np.int64)
    if array.null_count or not pa.types.is_integer(array.type):
        array = _cast(array, name, pa.int64())
        array = array.fill_null(missing)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if values.min() < low or values.max() > high:
        row = int(np.flatnonzero((values < low) | (values > high))[0])
        raise InvalidRequestError(
            f"record {row}: {name} {values[row]} is out of range, it must be {low} to {high}"
        )
    return values


def _keys(columns: dict[str, pa.Array], count: int) -> list[bytes] | None:
    array = columns.get("idempotency_key")
    if array is None or array.null_count == count:
        return None
    return text_keys(_cast(array, "idempotency_key", pa.string()).to_pylist())


def _headers(columns: dict[str, pa.Array], count: int) -> list[Headers] | None:
    array = columns.get("headers")
    if array is None or array.null_count == count:
        return None
    entries = _cast(array, "headers", HEADERS_TYPE).to_pylist()
    return check_headers([dict(entry) if entry else None for entry in entries])


def _header_columns(headers: list[Headers]) -> HeaderColumns | None:
    return HeaderColumns.of(headers) if any(headers) else None


def _cast(array: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    try:
        return array if array.type == kind else array.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"Arrow column {name!r} of type {array.type}: {error}") from error
