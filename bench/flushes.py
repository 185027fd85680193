"""`make bench-flushes`: whether the three-hundredth flush costs what the first ones did.

One table takes a small bulk and a flush, again and again. Printed for each window of flushes:
what a flush and its commit took, how many files and manifests the table has, and how long
planning a scan of all of them takes. Every tenth flush merges files, so flushes are averaged.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from pyiceberg.catalog.rest import RestCatalog
from rich.console import Console
from rich.table import Table

from bench.server import Server, gateway
from bench.workload import ARROW, arrow_body
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings

EVENTS = 1000
WINDOW = 50
PLANS = 5


@dataclass(frozen=True)
class Window:
    """The flushes up to `last`: means of a flush, medians of a commit and of planning."""

    last: int
    flush_ms: float
    flush_cpu_ms: float
    commit_ms: float
    commit_cpu_ms: float
    files: int
    manifests: int
    plan_ms: float


def main(
    flushes: Annotated[int, typer.Option(min=WINDOW, help="How many.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Flush one table many times and print what a flush costs as they become more."""
    with (
        tempfile.TemporaryDirectory(prefix="zombi-bench-") as name,
        gateway("wal", Path(name)) as server,
    ):
        settings = Settings(
            data_dir=Path(name) / "data", url=server.url, token=server.token, engine="arrow"
        )
        with Pipeline.opened(settings) as pipeline:
            found = [measure(server, pipeline, last) for last in range(WINDOW, flushes + 1, WINDOW)]
    if as_json:
        sys.stdout.write(json.dumps([asdict(window) for window in found]) + "\n")
    else:
        console = Console()
        console.width = max(console.width, 100)
        console.print(report(found))


def measure(server: Server, pipeline: Pipeline, last: int) -> Window:
    flush_ms, flush_cpu_ms, commit_ms, commit_cpu_ms = [], [], [], []
    for _ in range(WINDOW):
        send(server)
        started, started_cpu = time.perf_counter(), time.process_time()
        with pipeline.leased("orders") as work:
            work.stage_all()
            cpu = time.process_time()
            committed = work.commit()
            commit_cpu_ms.append((time.process_time() - cpu) * 1000)
            assert committed is not None
            commit_ms.append(committed.seconds * 1000)
            work.clean()
            work.merge()
        flush_ms.append((time.perf_counter() - started) * 1000)
        flush_cpu_ms.append((time.process_time() - started_cpu) * 1000)
    files, manifests, plan_ms = plan(server)
    return Window(
        last=last,
        flush_ms=statistics.fmean(flush_ms),
        flush_cpu_ms=statistics.fmean(flush_cpu_ms),
        commit_ms=statistics.median(commit_ms),
        commit_cpu_ms=statistics.median(commit_cpu_ms),
        files=files,
        manifests=manifests,
        plan_ms=plan_ms,
    )


def send(server: Server) -> None:
    headers = server.headers | {"Content-Type": ARROW}
    url = f"{server.url}/tables/orders/bulk"
    httpx.post(url, content=arrow_body(EVENTS), headers=headers).raise_for_status()


def plan(server: Server) -> tuple[int, int, float]:
    """Files, manifests and how long a client takes to plan a scan of everything."""
    token = {"token": server.token} if server.token else {}
    table = RestCatalog("zombi", uri=server.url, warehouse="lake", **token).load_table(
        "zombi.orders"
    )
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifests = len(snapshot.manifests(table.io))
    took = []
    for _ in range(PLANS):
        started = time.perf_counter()
        files = len(list(table.scan().plan_files()))
        took.append((time.perf_counter() - started) * 1000)
    return files, manifests, statistics.median(took)


def report(found: list[Window]) -> Table:
    table = Table(title=f"Flushes of {EVENTS} events, in windows of {WINDOW}")
    for heading in ("flushes", "flush ms", "CPU ms", "commit ms", "CPU ms"):
        table.add_column(heading, justify="right")
    for heading in ("files", "manifests", "plan ms"):
        table.add_column(heading, justify="right")
    for window in found:
        table.add_row(
            f"to {window.last}",
            f"{window.flush_ms:.0f}",
            f"{window.flush_cpu_ms:.0f}",
            f"{window.commit_ms:.0f}",
            f"{window.commit_cpu_ms:.0f}",
            f"{window.files}",
            f"{window.manifests}",
            f"{window.plan_ms:.0f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
