"""Every content type brings the same events to the same partitions."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pytest

from zombi_platform.errors import InvalidRequestError
from zombi_platform.gateway.decoding import ARROW, JSON, NDJSON, PROTOBUF, decode_bulk
from zombi_platform.gateway.event_pb2 import BulkWriteRequest
from zombi_platform.hot.blocks import Segment, decode_block, encode_block, to_arrow

PLAIN: list[dict[str, Any]] = [
    {"payload": text, "partition": partition, "timestamp_ms": stamp}
    for text, partition, stamp in (("a", 3, 9), ("é*", 1, 5), ("", 3, 7), ("dd", 9, 1))
]
KEYED = [{**record, "idempotency_key": f"k{i}"} for i, record in enumerate(PLAIN)]
MIXED = [PLAIN[0], KEYED[1], {**PLAIN[2], "headers": {"x": "y"}}, PLAIN[3]]


def as_json(records: list[dict[str, Any]]) -> bytes:
    return json.dumps({"records": records}).encode()


def as_ndjson(records: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


def as_protobuf(records: list[dict[str, Any]]) -> bytes:
    encoded = [{**record, "payload": record["payload"].encode()} for record in records]
    return BulkWriteRequest(records=encoded).SerializeToString()


def as_arrow(records: list[dict[str, Any]]) -> bytes:
    types = {
        "payload": pa.string(),
        "partition": pa.uint32(),
        "timestamp_ms": pa.int64(),
        "idempotency_key": pa.string(),
        "headers": pa.map_(pa.string(), pa.string()),
    }
    names = [name for name in types if any(name in record for record in records)]
    table = pa.table({n: pa.array([r.get(n) for r in records], types[n]) for n in names})
    return ipc(table, rows=2)


def ipc(table: pa.Table, rows: int = 1000) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


ENCODERS = {JSON: as_json, NDJSON: as_ndjson, PROTOBUF: as_protobuf, ARROW: as_arrow}


def events(segment: Segment) -> list[dict[str, Any]]:
    """A segment's events as a reader would get them."""
    block = decode_block(encode_block([segment], 1, 0, 0), 1)
    return list(to_arrow(segment.partition, [block]).to_pylist())


def expected(records: list[dict[str, Any]], partition: int) -> list[dict[str, Any]]:
    rows = [record for record in records if record["partition"] == partition]
    return [
        {
            "sequence": sequence,
            "partition": partition,
            "payload": row["payload"].encode(),
            "timestamp_ms": row["timestamp_ms"],
            "idempotency_key": row.get("idempotency_key"),
            "headers": list(row["headers"].items()) if "headers" in row else None,
        }
        for sequence, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize("content_type", ENCODERS)
@pytest.mark.parametrize("records", [PLAIN, KEYED, MIXED], ids=["plain", "keyed", "mixed"])
def test_each_type_brings_the_same_events(
    content_type: bytes, records: list[dict[str, Any]]
) -> None:
    segments, places = decode_bulk(content_type, ENCODERS[content_type](records), 10)
    assert places is not None
    assert list(places) == [3, 1, 3, 9]
    assert {segment.partition for segment in segments} == {1, 3, 9}
    for segment in segments:
        assert events(segment) == expected(records, segment.partition)


@pytest.mark.parametrize("content_type", ENCODERS)
def test_one_partition_makes_one_segment(content_type: bytes) -> None:
    records = [{**record, "partition": 7} for record in MIXED]
    [segment], places = decode_bulk(content_type, ENCODERS[content_type](records), 10)
    assert places is None
    assert events(segment) == expected(records, 7)


@pytest.mark.parametrize("content_type", ENCODERS)
def test_headers_past_the_limit_name_the_record_of_the_request(content_type: bytes) -> None:
    records = [*MIXED[:3], {**MIXED[3], "headers": {"n": "x" * 20_000}}]
    with pytest.raises(InvalidRequestError, match="record 3: 1 headers"):
        decode_bulk(content_type, ENCODERS[content_type](records), 10)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"payload": pa.array([1])}, "column 'payload' of type int64"),
        ({"payload": pa.array(["a"]), "partition": pa.array(["x"])}, "column 'partition'"),
        ({"payload": pa.array(["a"]), "timestamp_ms": pa.array([2**64 - 1], pa.uint64())}, "range"),
        ({"payload": pa.array(["a"]), "other": pa.array([1])}, "do not fit"),
        (
            {
                "payload": pa.array(["a"]),
                "headers": pa.array([[("n", None)]], pa.map_(pa.string(), pa.string())),
            },
            "record 0: a header is null",
        ),
    ],
)
def test_odd_arrow_columns_are_refused(columns: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decode_bulk(ARROW, ipc(pa.table(columns)), 10)


def test_arrow_columns_of_the_same_name_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["payload", "payload"])
    with pytest.raises(InvalidRequestError, match="do not fit"):
        decode_bulk(ARROW, ipc(table), 10)


def test_missing_numbers_in_small_arrow_types_are_filled_in() -> None:
    table = pa.table(
        {"payload": ["a", "b"], "partition": pa.array([None, 5], pa.int8()), "timestamp_ms": [1, 2]}
    )
    segments, _ = decode_bulk(ARROW, ipc(table), 10)
    assert [segment.partition for segment in segments] == [0, 5]


def test_an_arrow_schema_has_a_limit() -> None:
    table = pa.table({"payload": ["a"]}).replace_schema_metadata({"pad": "x" * 100_000})
    with pytest.raises(InvalidRequestError, match="schema has"):
        decode_bulk(ARROW, ipc(table), 10)
