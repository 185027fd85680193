"""What live reads cost: loads of the live view, queries on it, and what they take from ingest.

Part of `make bench`; alone: `python -m bench.live`. The table has a hundred thousand committed
events throughout, and hot ones on top.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.load import put_load
from bench.server import ZOMBI, BenchError, Server, free_port, running
from bench.workload import WORKLOADS, arrow_body
from zombi_platform.catalog.duckdb import attach, iceberg_duckdb
from zombi_platform.lake.lake import Lake
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings

TABLE = "live"
COLD_EVENTS = 100_000
HOT_EVENTS = (1_000, 10_000, 100_000)
BULK_EVENTS = 1_000
LOADS = 200
QUERIES = 30
READER_PERIOD_SECS = 0.25
SNAPSHOTS = 1_000
CONNECTIONS = 64
ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}

Seconds = list[float]


@contextmanager
def platform() -> Iterator[tuple[Server, Settings]]:
    """A gateway without tokens, and the settings of a worker that flushes for it."""
    with tempfile.TemporaryDirectory(prefix="zombi-bench-") as home:
        port = free_port()
        environ = {
            "ZOMBI_DATA_DIR": str(Path(home) / "data"),
            "ZOMBI_PORT": str(port),
            "ZOMBI_HOT_RETENTION_SECS": "0",
            "ZOMBI_MAX_HOT_BYTES_MB": "65536",
        }
        with running([str(ZOMBI), "gateway"], environ, port, Path(home), None) as server:
            environ |= {"ZOMBI_URL": server.url, "ZOMBI_ENGINE": "arrow"}
            yield server, Settings.from_env(environ)


class Reader:
    """Loads and queries of one table, timed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = httpx.Client(base_url=server.url, timeout=60)

    def send(self, events: int) -> None:
        for start in range(0, events, BULK_EVENTS):
            body = arrow_body(min(BULK_EVENTS, events - start))
            answer = self._http.post(f"/tables/{TABLE}/bulk", content=body, headers=ARROW)
            if answer.status_code != 202:
                raise BenchError(f"a bulk got {answer.status_code}: {answer.text[:200]}")

    def load(self, warehouse: str, etag: str = "", snapshots: str = "all") -> httpx.Response:
        url = f"/v1/{warehouse}/namespaces/zombi/tables/{TABLE}?snapshots={snapshots}"
        answer = self._http.get(url, headers={"If-None-Match": etag})
        if answer.status_code not in (200, 304):
            raise BenchError(f"a load got {answer.status_code}: {answer.text[:200]}")
        return answer

    def loads_after_an_event(self) -> Seconds:
        return timed(LOADS, lambda: self.load("live"), before=lambda: self.send(1))

    def unchanged_loads(self) -> Seconds:
        etag = self.load("live").headers["etag"]
        return timed(LOADS, lambda: self.load("live", etag))

    def counts(self, warehouse: str, *, fresh: bool) -> Seconds:
        before = (lambda: self.send(1)) if fresh else (lambda: None)
        with iceberg_duckdb() as duck:
            attach(duck, self._server.url, warehouse)
            query = f"SELECT count(*) FROM {warehouse}.zombi.{TABLE}"
            return timed(QUERIES, lambda: duck.execute(query).fetchall(), before=before)


def timed(times: int, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Seconds:
    """How long each of some calls takes; the first, which warms up, does not count."""
    taken = []
    for _ in range(times + 1):
        before()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken[1:]


def measure_views(progress: Console) -> Table:
    table = Table(title=f"Live view over {COLD_EVENTS:,} committed events, ms (p50 / p99)")
    table.add_column("hot events", justify="right")
    for heading in (
        "load after a new event",
        "unchanged load (304)",
        "count(*) live, new event",
        "count(*) live",
        "count(*) cold",
    ):
        table.add_column(heading, justify="right")
    with platform() as (server, settings):
        reader = Reader(server)
        reader.send(COLD_EVENTS)
        with Pipeline.opened(settings) as pipeline:
            pipeline.flush(TABLE)
        hot = 0
        for wanted in HOT_EVENTS:
            reader.send(wanted - hot)
            hot = wanted
            rows = [
                reader.loads_after_an_event(),
                reader.unchanged_loads(),
                reader.counts("live", fresh=True),
                reader.counts("live", fresh=False),
                reader.counts("lake", fresh=False),
            ]
            table.add_row(f"{wanted:,}", *(spread(row) for row in rows))
            progress.print(f"live   {wanted:>7,} hot events: load {spread(rows[0])} ms")
    return table


def measure_ingest(secs: int) -> Table:
    """Single events with fsync, first alone, then beside a reader of the same table."""
    workload = next(item for item in WORKLOADS if item.name == "single-json")
    table = Table(title="Ingest beside a live reader at 4 queries a second, single events, fsync")
    for heading in ("reader", "events/s", "p50 ms", "p99 ms", "queries", "query p50 ms"):
        table.add_column(heading, justify="right")
    for beside in (False, True):
        with platform() as (server, _):
            put_load(server, workload, 2, CONNECTIONS)
            with queries(server, workload.table, beside) as taken:
                load = put_load(server, workload, secs, CONNECTIONS)
        table.add_row(
            "yes" if beside else "no",
            f"{load.requests / load.secs:,.0f}",
            f"{load.p50_ms:.2f}",
            f"{load.p99_ms:.2f}",
            str(len(taken)),
            f"{statistics.median(taken) * 1000:.1f}" if taken else "",
        )
    return table


@contextmanager
def queries(server: Server, name: str, wanted: bool) -> Iterator[Seconds]:
    """Counts the table in the background, four times a second."""
    taken: Seconds = []
    ready, stopping = threading.Event(), threading.Event()

    def run() -> None:
        with iceberg_duckdb() as duck:
            attach(duck, server.url, "live")
            query = f'SELECT count(*) FROM live.zombi."{name}"'
            # The first one prepares what is hot already.
            duck.execute(query).fetchall()
            ready.set()
            while not stopping.wait(READER_PERIOD_SECS):
                started = time.perf_counter()
                duck.execute(query).fetchall()
                taken.append(time.perf_counter() - started)

    thread = threading.Thread(target=run)
    if wanted:
        thread.start()
        ready.wait()
    try:
        yield taken
    finally:
        stopping.set()
        if wanted:
            thread.join()


def measure_large_load() -> Table:
    """A table whose metadata lists a thousand snapshots; no reader of a load opens more."""
    table = Table(
        title=f"Load of a table with {SNAPSHOTS:,} snapshots: gateway CPU, target ≤ 10 ms"
    )
    for heading in ("snapshots", "size KB", "CPU ms"):
        table.add_column(heading, justify="right")
    with platform() as (server, settings):
        reader = Reader(server)
        reader.send(BULK_EVENTS)
        with Pipeline.opened(settings) as pipeline:
            pipeline.flush(TABLE)
        multiply_snapshots(Lake(settings))
        for snapshots in ("all", "refs"):
            load = partial(reader.load, "lake", snapshots=snapshots)
            size = len(load().content)
            before = server.settled_cpu_secs()
            timed(LOADS, load)
            cpu_ms = (server.settled_cpu_secs() - before) / (LOADS + 1) * 1000
            table.add_row(snapshots, f"{size / 1000:,.0f}", f"{cpu_ms:.2f}")
    return table


def multiply_snapshots(lake: Lake) -> None:
    """Write the next version of the table with its snapshot a thousand times."""
    state = lake.require_state(TABLE)
    metadata = msgspec.json.decode(lake.storage.read(state.metadata_location))
    (snapshot,) = metadata["snapshots"]
    older = [{**snapshot, "snapshot-id": number} for number in range(1, SNAPSHOTS)]
    metadata["snapshots"] = [*older, snapshot]
    lake.storage.create(
        state.metadata_location.replace("/v2.", "/v3."), msgspec.json.encode(metadata)
    )


def spread(taken: Seconds) -> str:
    ordered = sorted(second * 1000 for second in taken)
    return f"{ordered[len(ordered) // 2]:.1f} / {ordered[len(ordered) * 99 // 100]:.1f}"


def main(
    seconds: Annotated[int, typer.Option(min=1, help="Length of each ingest run.")] = 8,
) -> None:
    """Measure what live reads cost."""
    progress, console = Console(stderr=True), Console()
    console.width = max(console.width, 120)
    try:
        for table in (measure_views(progress), measure_ingest(seconds), measure_large_load()):
            console.print(table)
    except BenchError as error:
        progress.print(f"bench failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
