"""`make memory`: the gateway's memory through many events and many distinct keys.

All write formats take turns at once, a part of the events carries a key that no other has, and a
reader scans the table over and over. The figure is the peak the kernel saw, from start to end.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from threading import Event
from typing import Annotated

import httpx
import typer

from bench.scan import scan_table
from bench.server import BenchError, Server, gateway
from bench.workload import PARTITIONS, PAYLOAD, WORKLOADS

LIMIT_MB = 500
BATCH = 1000
CONNECTIONS = 4
TABLE = "bulk-json-1000"
MILLION = 1_000_000

Request = tuple[bytes, str]


def main(
    million_events: Annotated[float, typer.Option(help="Events, in millions.")] = 20,
    million_keys: Annotated[float, typer.Option(help="Distinct keys, in millions.")] = 2,
    mode: Annotated[str, typer.Option(help="fsync, wal or none.")] = "fsync",
) -> None:
    """Ingest, and print the peak of the gateway's memory."""
    keyed = int(million_keys * MILLION) // BATCH
    plain = int(million_events * MILLION) // BATCH - keyed
    with (
        tempfile.TemporaryDirectory(prefix="zombi-memory-") as home,
        gateway(mode, Path(home)) as server,
    ):
        started = time.perf_counter()
        ingest(server, keyed, plain)
        secs, peak = time.perf_counter() - started, server.rss_peak_mb()
        tables = httpx.get(f"{server.url}/tables", headers=server.headers).json()["tables"]
    events = sum(table["events"] for table in tables)
    typer.echo(
        f"{events / MILLION:.1f} million events, {keyed * BATCH / MILLION:.1f} million keys, "
        f"{mode}, {secs:.0f} s: peak RSS {peak:.0f} MB of {LIMIT_MB} MB"
    )
    if peak > LIMIT_MB or events != (keyed + plain) * BATCH:
        raise typer.Exit(1)


def ingest(server: Server, keyed: int, plain: int) -> None:
    done = Event()
    with ThreadPoolExecutor(CONNECTIONS + 1) as pool:
        reader = pool.submit(scan_until, server, done)
        shares = [
            pool.submit(send, server, requests(number, keyed // CONNECTIONS, plain // CONNECTIONS))
            for number in range(CONNECTIONS)
        ]
        try:
            for share in shares:
                share.result()
        finally:
            done.set()
        reader.result()


def requests(number: int, keyed: int, plain: int) -> Iterator[Request]:
    """Plain batches of every format with keyed ones spread evenly among them."""
    bulks = [workload for workload in WORKLOADS if workload.events > 1]
    bodies = [(next(w.bodies(BATCH, "memory")), w.content_type) for w in bulks]
    sent = 0
    for index, request in enumerate(islice(cycle(bodies), plain)):
        while sent * plain < keyed * (index + 1):
            yield keyed_batch(number, sent), "application/json"
            sent += 1
        yield request


def keyed_batch(number: int, batch: int) -> bytes:
    records = [
        {
            "payload": PAYLOAD,
            "partition": i % PARTITIONS,
            "idempotency_key": f"{number}/{batch}/{i}",
        }
        for i in range(BATCH)
    ]
    return json.dumps({"records": records}).encode()


def send(server: Server, batches: Iterator[Request]) -> None:
    headers = server.headers | {"Prefer": "return=minimal"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for body, content_type in batches:
            path, kind = f"/tables/{TABLE}/bulk", {"Content-Type": content_type}
            answer = client.post(path, content=body, headers=kind)
            if answer.status_code != 202:
                raise BenchError(f"a write failed: {answer.status_code} {answer.text}")


def scan_until(server: Server, done: Event) -> None:
    while not done.wait(2):
        scan_table(server, TABLE)


if __name__ == "__main__":
    typer.run(main)
