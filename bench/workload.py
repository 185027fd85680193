"""The workloads: what is sent, how many events a request carries, and what an event may cost.

Each is described twice, as a wrk script in `workloads/` and as a Python function that builds the
same body, so that the bench also runs where wrk does not. The payload is 82 bytes everywhere;
bulk requests spread over four partitions.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat

import pyarrow as pa

PAYLOAD = '{"user":1,"action":"click","pad":"' + "x" * 46 + '"}'
TIMESTAMP_MS = 1_700_000_000_000
PARTITIONS = 4
FSYNC_FACTOR = 1.5
SCAN_TARGET = 0.5


@dataclass(frozen=True)
class Workload:
    """One kind of request; `target` is CPU-seconds per million events without fsync."""

    name: str
    script: str
    events: int
    target: float | None
    content_type: str
    bodies: Callable[[int, str], Iterator[bytes]]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> str:
        return self.name

    @property
    def path(self) -> str:
        return f"/tables/{self.table}" + ("/bulk" if self.events > 1 else "")

    def target_for(self, durability: str) -> float | None:
        if self.target is None or durability != "fsync":
            return self.target
        return self.target * FSYNC_FACTOR


def single_json(_events: int, _run: str) -> Iterator[bytes]:
    record = {"payload": PAYLOAD, "partition": 0, "timestamp_ms": TIMESTAMP_MS}
    return repeat(compact(record))


def single_keyed(_events: int, run: str) -> Iterator[bytes]:
    record = {"payload": "x" * 82, "partition": 0, "timestamp_ms": TIMESTAMP_MS}
    return (
        compact({**record, "idempotency_key": f"k0-{number}-table: 0x{run}"}) for number in count(1)
    )


def bulk_json(events: int, _run: str) -> Iterator[bytes]:
    records = [
        {"payload": PAYLOAD, "partition": i % PARTITIONS, "timestamp_ms": TIMESTAMP_MS + i}
        for i in range(events)
    ]
    return repeat(compact({"records": records}))


def proto_single(_events: int, _run: str) -> Iterator[bytes]:
    return repeat(proto_bytes(1, PAYLOAD.encode()) + proto_number(2, TIMESTAMP_MS))


def proto_bulk(events: int, _run: str) -> Iterator[bytes]:
    records = (
        proto_bytes(1, PAYLOAD.encode())
        + proto_number(2, i % PARTITIONS)
        + proto_number(3, TIMESTAMP_MS + i)
        for i in range(events)
    )
    return repeat(b"".join(proto_bytes(1, record) for record in records))


def arrow_bulk(events: int, _run: str) -> Iterator[bytes]:
    return repeat(arrow_body(events))


def arrow_body(events: int) -> bytes:
    """An Arrow IPC stream of one batch; wrk cannot build it and reads it from a file."""
    batch = pa.record_batch(
        {
            "payload": pa.array([PAYLOAD.encode()] * events, pa.binary()),
            "partition": pa.array([i % PARTITIONS for i in range(events)], pa.uint32()),
            "timestamp_ms": pa.array([TIMESTAMP_MS + i for i in range(events)], pa.int64()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def proto_number(field: int, number: int) -> bytes:
    """A field of zero is left out, as protobuf's own encoders do."""
    return varint(field << 3) + varint(number) if number else b""


def proto_bytes(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


JSON = "application/json"
PROTO = "application/x-protobuf"
ARROW = "application/vnd.apache.arrow.stream"

WORKLOADS = (
    Workload("single-json", "single_json.lua", 1, 18, JSON, single_json),
    Workload("single-keyed", "single_keyed.lua", 1, 22, JSON, single_keyed),
    Workload("single-proto", "proto.lua", 1, None, PROTO, proto_single, (("X-Partition", "0"),)),
    Workload("bulk-json-100", "bulk_json.lua", 100, 1.4, JSON, bulk_json),
    Workload("bulk-json-1000", "bulk_json.lua", 1000, 1.1, JSON, bulk_json),
    Workload("bulk-proto-100", "proto.lua", 100, 1.3, PROTO, proto_bulk),
    Workload("bulk-arrow-1000", "arrow.lua", 1000, 0.5, ARROW, arrow_bulk),
)
