"""Columns of events as bytes: segments on their way in, blocks at rest, Arrow on the way out.

A segment is what one request brings for one partition; a block is the segments of one
group commit for one partition behind a fixed header. Both hold the same columns as plain
little-endian sections, so that committing, merging and scanning only join bytes. A block
is checked when it is read: its sections must add up to its length, and neighbours must
continue each other's sequences.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from zombi_platform.errors import CorruptionError
from zombi_platform.events import COLUMNS, HEADERS_TYPE

BLOCK_EVENTS_MAX: Final = 65_536
BLOCK_BYTES_MAX: Final = 8 * 2**20
"""A group's events are split into blocks near these sizes; one larger event is one block."""

Pieces = Sequence[bytes | memoryview]

MAGIC: Final = b"ZBK1"
HEADER: Final = struct.Struct("<4sIQqqqQ7I4x")
"""magic, count, first, ts_min, ts_max, ingest_ms, bytes_before, then seven section sizes
(payloads, key lengths, keys, header counts, header lengths, header names, header values)."""


class HeaderColumns(msgspec.Struct, gc=False):
    """Event headers: how many each event has, then all names and all values in a row."""

    counts: bytes
    name_lengths: bytes
    value_lengths: bytes
    names: bytes
    values: bytes

    @staticmethod
    def of(maps: Sequence[dict[str, str] | None]) -> HeaderColumns:
        names = [name.encode() for entry in maps if entry for name in entry]
        values = [value.encode() for entry in maps if entry for value in entry.values()]
        return HeaderColumns(
            counts=lengths_of([entry or () for entry in maps]),
            name_lengths=lengths_of(names),
            value_lengths=lengths_of(values),
            names=b"".join(names),
            values=b"".join(values),
        )


class Segment(msgspec.Struct, gc=False):
    """What one request brings for one partition; the group commit fills in the sequences."""

    partition: int
    count: int
    ts_min: int
    ts_max: int
    timestamps: bytes
    payload_lengths: bytes
    payloads: bytes
    keys: list[bytes] | None = None
    """One per event, empty where an event has none; None when no event has one."""
    headers: HeaderColumns | None = None
    first: int = 0
    offsets: list[int] | None = None
    """Set instead of `first` when duplicates broke the row of sequences."""

    def take(self, rows: list[int]) -> Segment:
        """The same columns with these rows only; for the rare segment with duplicates."""
        lengths = np.frombuffer(self.payload_lengths, "<u4").astype(np.int64)
        ends = lengths.cumsum()
        starts = ends - lengths
        stamps = np.frombuffer(self.timestamps, "<i8")[rows]
        return Segment(
            partition=self.partition,
            count=len(rows),
            ts_min=int(stamps.min()),
            ts_max=int(stamps.max()),
            timestamps=stamps.tobytes(),
            payload_lengths=lengths[rows].astype("<u4").tobytes(),
            payloads=b"".join(self.payloads[starts[row] : ends[row]] for row in rows),
            keys=None if self.keys is None else [self.keys[row] for row in rows],
            headers=None if self.headers is None else _take_headers(self.headers, rows),
        )


class Block(msgspec.Struct, gc=False):
    """A stored block, its sections still as views into the stored bytes."""

    count: int
    first: int
    ts_min: int
    ts_max: int
    ingest_ms: int
    bytes_before: int
    """Bytes of all events of the partition ahead of this block since the partition began;
    the difference of two blocks is the size of what lies between, with nothing scanned."""
    size: int
    timestamps: memoryview
    payload_lengths: memoryview
    payloads: memoryview
    key_lengths: memoryview
    keys: memoryview
    header_counts: memoryview
    name_lengths: memoryview
    value_lengths: memoryview
    names: memoryview
    values: memoryview

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def lengths_of(items: Iterable[Any]) -> bytes:
    """The lengths of the items as u32."""
    lengths = list(map(len, items))
    return struct.pack(f"<{len(lengths)}I", *lengths)


def encode_block(
    segments: Sequence[Segment], first: int, ingest_ms: int, bytes_before: int
) -> bytes:
    """One block of these segments, whose first event gets sequence `first`."""
    keys: list[bytes] = []
    if any(segment.keys is not None for segment in segments):
        keys = [key for segment in segments for key in segment.keys or [b""] * segment.count]
    counts: list[bytes] = []
    headers = [segment.headers for segment in segments if segment.headers is not None]
    if headers:
        counts = [
            bytes(4 * segment.count) if segment.headers is None else segment.headers.counts
            for segment in segments
        ]
    return _assemble(
        segments,
        first,
        ingest_ms,
        bytes_before,
        [segment.timestamps for segment in segments],
        [segment.payload_lengths for segment in segments],
        [segment.payloads for segment in segments],
        [lengths_of(keys)] if keys else [],
        keys,
        counts,
        [columns.name_lengths for columns in headers],
        [columns.value_lengths for columns in headers],
        [columns.names for columns in headers],
        [columns.values for columns in headers],
    )


def merge_blocks(blocks: Sequence[Block]) -> bytes:
    """One block that stands for these neighbours, event for event."""
    check_continuous(blocks)
    head = blocks[0]
    return _assemble(
        blocks,
        head.first,
        head.ingest_ms,
        head.bytes_before,
        [block.timestamps for block in blocks],
        [block.payload_lengths for block in blocks],
        [block.payloads for block in blocks],
        _filled(blocks, [block.key_lengths for block in blocks]),
        [block.keys for block in blocks],
        _filled(blocks, [block.header_counts for block in blocks]),
        [block.name_lengths for block in blocks],
        [block.value_lengths for block in blocks],
        [block.names for block in blocks],
        [block.values for block in blocks],
    )


def _assemble(
    parts: Sequence[Segment] | Sequence[Block],
    first: int,
    ingest_ms: int,
    bytes_before: int,
    timestamps: Pieces,
    payload_lengths: Pieces,
    payloads: Pieces,
    key_lengths: Pieces,
    keys: Pieces,
    header_counts: Pieces,
    name_lengths: Pieces,
    value_lengths: Pieces,
    names: Pieces,
    values: Pieces,
) -> bytes:
    """One block; every section comes in pieces, so that all bytes are copied just once."""
    sized = (payloads, key_lengths, keys, header_counts, name_lengths, names, values)
    header = HEADER.pack(
        MAGIC,
        sum([part.count for part in parts]),
        first,
        min([part.ts_min for part in parts]),
        max([part.ts_max for part in parts]),
        ingest_ms,
        bytes_before,
        *[sum(map(len, pieces)) for pieces in sized],
    )
    return b"".join(
        [
            header,
            *timestamps,
            *payload_lengths,
            *payloads,
            *key_lengths,
            *keys,
            *header_counts,
            *name_lengths,
            *value_lengths,
            *names,
            *values,
        ]
    )


def _filled(blocks: Sequence[Block], column: Sequence[memoryview]) -> Pieces:
    """A u32 column that some blocks lack, with zeros for those; empty if all lack it."""
    if not any(column):
        return []
    return [part or bytes(4 * block.count) for part, block in zip(column, blocks, strict=True)]


def decode_block(value: bytes, first: int) -> Block:
    """The block stored under sequence `first`; raises if its bytes do not add up."""
    if len(value) < HEADER.size or value[:4] != MAGIC:
        raise CorruptionError(f"the block at sequence {first} does not begin with {MAGIC!r}")
    (_, count, stored_first, ts_min, ts_max, ingest_ms, bytes_before, *sizes) = HEADER.unpack_from(
        value
    )
    payloads, key_lengths, keys, counts, header_lengths, names, values = sizes
    view = memoryview(value)
    sections = []
    position = HEADER.size
    for size in (
        8 * count,
        4 * count,
        payloads,
        key_lengths,
        keys,
        counts,
        header_lengths,
        header_lengths,
        names,
        values,
    ):
        sections.append(view[position : position + size])
        position += size
    if position != len(value) or stored_first != first or count == 0:
        raise CorruptionError(
            f"the block at sequence {first} holds {len(value)} bytes from sequence "
            f"{stored_first}, but its header describes {position}"
        )
    return Block(
        count, first, ts_min, ts_max, ingest_ms, bytes_before, position - HEADER.size, *sections
    )


def to_arrow(partition: int, blocks: Sequence[Block]) -> pa.RecordBatch:
    """The blocks, which must be neighbours of one partition, as one record batch."""
    check_continuous(blocks)
    first, count = blocks[0].first, sum(block.count for block in blocks)
    columns = [
        pa.array(np.arange(first, first + count, dtype=np.int64)),
        pa.array(np.full(count, partition, dtype=np.int64)),
        _binary(
            pa.large_binary(), [b.payload_lengths for b in blocks], [b.payloads for b in blocks]
        ),
        _int64(b"".join([block.timestamps for block in blocks]), count),
        _keys(blocks, count),
        _headers(blocks, count),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


def check_continuous(blocks: Sequence[Block]) -> None:
    """INV-1 on the way out: each block continues the one before it."""
    for before, after in itertools.pairwise(blocks):
        if after.first != before.last + 1:
            raise CorruptionError(
                f"a block ends at sequence {before.last}, the next begins at {after.first}"
            )


def _take_headers(columns: HeaderColumns, rows: list[int]) -> HeaderColumns:
    maps = _header_array(
        columns.counts, columns.name_lengths, columns.value_lengths, columns.names, columns.values
    )
    return HeaderColumns.of(
        [dict(entry) if entry else None for entry in maps.take(pa.array(rows)).to_pylist()]
    )


def _int64(data: bytes, count: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(data)])


def _binary(
    kind: pa.DataType, lengths: Sequence[memoryview | bytes], data: Sequence[memoryview | bytes]
) -> pa.Array:
    """A string-like array from lengths and bytes."""
    sizes = np.frombuffer(b"".join(lengths), "<u4")
    width = np.int64 if kind in (pa.large_binary(), pa.large_string()) else np.int32
    offsets = np.zeros(len(sizes) + 1, dtype=width)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(kind, len(sizes), buffers)


def _keys(blocks: Sequence[Block], count: int) -> pa.Array:
    lengths = b"".join(_filled(blocks, [block.key_lengths for block in blocks]))
    if not lengths:
        return pa.nulls(count, pa.string())
    array = _binary(pa.string(), [lengths], [block.keys for block in blocks])
    valid = np.packbits(np.frombuffer(lengths, "<u4") != 0, bitorder="little")
    _, offsets, data = array.buffers()
    return pa.Array.from_buffers(pa.string(), count, [pa.py_buffer(valid), offsets, data])


def _headers(blocks: Sequence[Block], count: int) -> pa.Array:
    counts = b"".join(_filled(blocks, [block.header_counts for block in blocks]))
    if not counts:
        return pa.nulls(count, HEADERS_TYPE)
    return _header_array(
        counts,
        b"".join([block.name_lengths for block in blocks]),
        b"".join([block.value_lengths for block in blocks]),
        b"".join([block.names for block in blocks]),
        b"".join([block.values for block in blocks]),
    )


def _header_array(
    counts: bytes, name_lengths: bytes, value_lengths: bytes, names: bytes, values: bytes
) -> pa.Array:
    """Headers as a map array; an event without headers has an empty map, which reads as null."""
    sizes = np.frombuffer(counts, "<u4")
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    entries = pa.StructArray.from_arrays(
        [
            _binary(pa.string(), [name_lengths], [names]),
            _binary(pa.string(), [value_lengths], [values]),
        ],
        fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())],
    )
    valid = np.packbits(sizes != 0, bitorder="little")
    return pa.Array.from_buffers(
        HEADERS_TYPE,
        len(sizes),
        [pa.py_buffer(valid), pa.py_buffer(offsets)],
        children=[entries],
    )
