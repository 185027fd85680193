"""`make bench-gateway`: every workload in every durability mode, beside the floor and the targets.

Each measurement starts a fresh server with an empty data directory, warms it up, puts the load on
and reads its CPU time when background work has settled. The floor of a workload is measured right
before the gateway, so that both feel the same neighbours; of several rounds the cheapest counts,
because neighbours only ever add. Any failed request ends the bench: a fast error is not a result.
A missed target does not: it is printed in red.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.load import put_load, wrk_installed
from bench.scan import scan_table
from bench.server import BenchError, Server, floor, gateway
from bench.workload import SCAN_TARGET, WORKLOADS, Workload

FLOOR = "floor"
MODES = ("wal", "fsync")
SCANNED = "bulk-json-1000"
FLOOR_SECS_MAX = 4
WARM_UP_SECS = 2
REPORT_WIDTH_MIN = 110


@dataclass(frozen=True)
class Measurement:
    """One line of the report."""

    server: str
    workload: str
    events_per_sec: float
    p50_ms: float | None
    p99_ms: float | None
    cpu_secs_per_million: float
    target: float | None
    rss_peak_mb: float


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    workloads: tuple[Workload, ...]
    modes: tuple[str, ...]
    secs: int
    connections: int
    rounds: int


def measure(plan: Plan) -> Iterator[Measurement]:
    for workload in plan.workloads:
        for _ in range(plan.rounds):
            for mode in (FLOOR, *plan.modes):
                with started(mode) as server:
                    yield measure_load(server, mode, workload, plan)
                    if workload.name == SCANNED and mode != FLOOR:
                        yield measure_scan(server, mode, workload)


def cheapest(measurements: list[Measurement]) -> list[Measurement]:
    """The best round of each, ordered by durability and then workload."""
    best: dict[tuple[str, str], Measurement] = {}
    for m in measurements:
        found = best.get((m.server, m.workload))
        if found is None or m.cpu_secs_per_million < found.cpu_secs_per_million:
            best[m.server, m.workload] = m
    servers = list(dict.fromkeys(m.server for m in measurements))
    return sorted(best.values(), key=lambda m: servers.index(m.server))


@contextmanager
def started(mode: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="zombi-bench-") as home:
        place = Path(home)
        with floor(place) if mode == FLOOR else gateway(mode, place) as server:
            yield server


def measure_load(server: Server, mode: str, workload: Workload, plan: Plan) -> Measurement:
    secs = min(plan.secs, FLOOR_SECS_MAX) if mode == FLOOR else plan.secs
    put_load(server, workload, min(secs, WARM_UP_SECS), plan.connections)
    cpu_before = server.settled_cpu_secs()
    load = put_load(server, workload, secs, plan.connections)
    cpu_secs = server.settled_cpu_secs() - cpu_before
    events = load.requests * workload.events
    return Measurement(
        server=mode,
        workload=workload.name,
        events_per_sec=events / load.secs,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        cpu_secs_per_million=cpu_secs / events * 1e6,
        target=None if mode == FLOOR else workload.target_for(mode),
        rss_peak_mb=server.rss_peak_mb(),
    )


def measure_scan(server: Server, mode: str, workload: Workload) -> Measurement:
    scan = scan_table(server, workload.table)
    return Measurement(
        server=mode,
        workload=f"scan of {workload.name}",
        events_per_sec=scan.rows / scan.secs,
        p50_ms=None,
        p99_ms=None,
        cpu_secs_per_million=scan.cpu_secs / scan.rows * 1e6,
        target=SCAN_TARGET,
        rss_peak_mb=server.rss_peak_mb(),
    )


def report(measurements: list[Measurement]) -> Table:
    floors = {m.workload: m.cpu_secs_per_million for m in measurements if m.server == FLOOR}
    table = Table(title="Server CPU-seconds per million events (lower is better)")
    for heading in ("durability", "workload"):
        table.add_column(heading)
    for heading in ("events/s", "p50 ms", "p99 ms", "CPU-s/M", "floor", "target", "RSS MB"):
        table.add_column(heading, justify="right")
    for m in measurements:
        table.add_row(
            m.server,
            m.workload,
            f"{m.events_per_sec:,.0f}",
            decimal(m.p50_ms),
            decimal(m.p99_ms),
            verdict(m),
            decimal(floors.get(m.workload)),
            "" if m.target is None else f"≤ {m.target:.2f}",
            f"{m.rss_peak_mb:.0f}",
        )
    return table


def decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def verdict(m: Measurement) -> str:
    figure = decimal(m.cpu_secs_per_million)
    if m.target is None:
        return figure
    return f"[green]{figure}[/]" if m.cpu_secs_per_million <= m.target else f"[red]{figure}[/]"


def chosen(names: list[str], known: dict[str, Workload]) -> tuple[Workload, ...]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def main(
    workload: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Durability mode; repeatable.")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="Length of each measurement.")] = 8,
    connections: Annotated[int, typer.Option(min=1, max=10_000)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Repeat, and report the cheapest.")] = 1,
    floor_only: Annotated[bool, typer.Option("--floor-only", help="Start no gateway.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Measure what an event costs the gateway."""
    progress = Console(stderr=True)
    known = {item.name: item for item in WORKLOADS}
    modes = () if floor_only else tuple(mode or MODES)
    plan = Plan(chosen(workload or [], known), modes, seconds, connections, rounds)
    if not wrk_installed():
        progress.print("wrk is not installed: the slower Python sender is used instead")
    measurements = []
    try:
        for measurement in measure(plan):
            progress.print(
                f"{measurement.server:6} {measurement.workload:24} {verdict(measurement)}"
            )
            measurements.append(measurement)
    except BenchError as error:
        progress.print(f"bench failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    measurements = cheapest(measurements)
    if as_json:
        Console().print_json(json.dumps([asdict(m) for m in measurements]))
    else:
        console = Console()
        # A pipe or a log has no width of its own; rich would cut the columns to 80.
        console.width = max(console.width, REPORT_WIDTH_MIN)
        console.print(report(measurements))


if __name__ == "__main__":
    typer.run(main)
