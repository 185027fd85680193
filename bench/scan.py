"""Reads the hot events of a table back as Arrow and says what that cost the server."""

import time
from dataclasses import dataclass

import httpx
import pyarrow as pa

from bench.server import BenchError, Server
from bench.workload import ARROW, PARTITIONS

ROWS_MAX = 1_000_000
TIMEOUT_SECS = 60.0


@dataclass(frozen=True)
class Scan:
    rows: int
    secs: float
    cpu_secs: float


def scan_table(server: Server, table: str) -> Scan:
    """One page of at most a million rows from each partition."""
    cpu_before, started = server.settled_cpu_secs(), time.perf_counter()
    with httpx.Client(headers=server.headers | {"Accept": ARROW}, timeout=TIMEOUT_SECS) as client:
        bodies = [read_partition(client, server, table, number) for number in range(PARTITIONS)]
    secs, cpu_secs = time.perf_counter() - started, server.cpu_secs() - cpu_before
    rows = sum(count_rows(body) for body in bodies)
    if rows == 0:
        raise BenchError(f"the scan of {table} found no event")
    return Scan(rows, secs, cpu_secs)


def read_partition(client: httpx.Client, server: Server, table: str, partition: int) -> bytes:
    answer = client.get(
        f"{server.url}/tables/{table}", params={"partition": partition, "limit": ROWS_MAX}
    )
    if not answer.is_success:
        raise BenchError(f"the scan of {table} was answered {answer.status_code}: {answer.text}")
    return answer.content


def count_rows(body: bytes) -> int:
    with pa.ipc.open_stream(body) as reader:
        return sum(batch.num_rows for batch in reader)
