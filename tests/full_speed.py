"""`python -m tests.full_speed URL`: writers at full speed in a process of their own.

They write until standard input ends; then what they were acked is printed as JSON.
"""

from __future__ import annotations

import json
import sys
import threading

import httpx
import numpy as np
import pyarrow as pa

WRITERS, PARTITIONS, BULK = 4, 4, 2_000


class Writer(threading.Thread):
    """Sends as fast as it is acked, each bulk over all partitions."""

    def __init__(self, url: str, body: bytes, stopping: threading.Event) -> None:
        super().__init__()
        self._url, self._body, self._stopping = url, body, stopping
        self.events = 0
        self.last = [0] * PARTITIONS
        """Highest sequence acked to this writer, by partition."""

    def run(self) -> None:
        headers = {
            "Content-Type": "application/vnd.apache.arrow.stream",
            "Prefer": "return=minimal",
        }
        with httpx.Client(base_url=self._url, headers=headers, timeout=120) as client:
            while not self._stopping.is_set():
                answer = client.post("/tables/t/bulk", content=self._body).raise_for_status()
                for partition, found in answer.json()["partitions"].items():
                    self.last[int(partition)] = found["last"]
                self.events += BULK


def body() -> bytes:
    numbers = np.arange(BULK)
    batch = pa.record_batch(
        {
            "payload": pa.array([b"%064d" % number for number in numbers]),
            "partition": pa.array(numbers % PARTITIONS),
            "timestamp_ms": pa.array(1_700_000_000_000 + numbers),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def main() -> None:
    stopping = threading.Event()
    sent = body()
    writers = [Writer(sys.argv[1], sent, stopping) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    sys.stdin.read()
    stopping.set()
    for writer in writers:
        writer.join()
    last = [max(writer.last[p] for writer in writers) for p in range(PARTITIONS)]
    print(json.dumps({"events": sum(writer.events for writer in writers), "last": last}))  # noqa: T201


if __name__ == "__main__":
    main()
