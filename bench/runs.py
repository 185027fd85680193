"""`make bench`, second part: what a flush costs as Dagster runs it, and where its time goes.

Starts the whole platform, puts tables over their threshold and takes the times of the runs
from Dagster's own records. CPU time counts every process of the platform, run workers too,
less what the platform spends when nothing happens.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.server import TICKS_PER_SEC, ZOMBI, BenchError

EVENTS = 50_000
BATCH = 5_000
PAYLOAD = "x" * 200
IDLE_SECS = 15.0
WAIT_SECS_MAX = 300.0
POLL_SECS = 0.5
SETTINGS = {
    "ZOMBI_PORT": "0",
    "ZOMBI_DAGSTER_PORT": "0",
    # Only bytes make a flush due, so the moment at which it becomes due is known.
    "ZOMBI_FLUSH_INTERVAL_SECS": "86400",
    "ZOMBI_TARGET_FILE_SIZE_MB": "4",
    "ZOMBI_SNAPSHOT_THRESHOLD_FILES": "1",
}
RUNS = """{ runsOrError(limit: 200) { ... on Runs { results {
  runId status jobName creationTime startTime endTime stats { ... on RunStatsSnapshot {
  launchTime } } stepStats { stepKey startTime endTime } } } } }"""


@dataclass(frozen=True)
class Flush:
    """One measurement: seconds of each stretch, CPU-seconds of everything together."""

    tables: int
    runs: int
    sensor_secs: float
    queue_secs: float
    start_secs: float
    work_secs: float
    cpu_secs: float

    @property
    def secs(self) -> float:
        return self.sensor_secs + self.queue_secs + self.start_secs + self.work_secs


@dataclass(frozen=True)
class Platform:
    home: Path
    gateway: httpx.Client
    web: httpx.Client

    def cpu_secs(self) -> float:
        """Of every living process and of those they have waited for."""
        mark = f"ZOMBI_DATA_DIR={self.home}".encode()
        ticks = 0
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    ticks += sum(map(int, fields[11:15]))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return ticks / TICKS_PER_SEC

    def send(self, table: str) -> None:
        record = {"payload": PAYLOAD}
        for _ in range(EVENTS // BATCH):
            body = {"records": [record] * BATCH}
            answer = self.gateway.post(f"/tables/{table}/bulk", json=body)
            if answer.status_code != 202:
                raise BenchError(f"a write was refused: {answer.text[:200]}")

    def hot_events(self) -> int:
        tables = self.gateway.get("/pipeline/tables").json()["tables"]
        return sum(table["events"] for table in tables)

    def runs(self) -> list[dict[str, Any]]:
        answer = self.web.post("/graphql", json={"query": RUNS}).json()
        found: list[dict[str, Any]] = answer["data"]["runsOrError"]["results"]
        return found


@contextmanager
def platform(engine: str) -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="zombi-bench-") as place:
        home = Path(place) / "home"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        environ |= SETTINGS | {"ZOMBI_DATA_DIR": str(home)}
        log = Path(place) / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [ZOMBI, "up", "--engine", engine], env=environ, stdout=output, stderr=output
            )
        try:
            wait(lambda: services(home, process), f"the platform to start:\n{log.read_text()}")
            found = services(home, process)
            with (
                httpx.Client(base_url=found["gateway"], timeout=60) as gateway,
                httpx.Client(base_url=found["web"], timeout=60) as web,
            ):
                yield Platform(home, gateway, web)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def services(home: Path, process: "subprocess.Popen[bytes]") -> dict[str, str]:
    if process.poll() is not None:
        raise BenchError("the platform did not start")
    try:
        known = json.loads((home / "up.lock").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(known["services"])


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"waited in vain for {what}")
        time.sleep(POLL_SECS)


def measure(here: Platform, tables: list[str], idle_cpu: float) -> Flush:
    before = {run["runId"] for run in here.runs()}
    for table in tables:
        here.send(table)
    # Sending is the gateway's cost, which the first part of the bench measures.
    cpu, started, due = here.cpu_secs(), time.monotonic(), time.time()
    wait(lambda: here.hot_events() == 0, "events to reach the lake")
    new = [run for run in here.runs() if run["runId"] not in before]
    wait(lambda: all(run["endTime"] for run in here.runs()), "runs to end")
    new = [run for run in here.runs() if run["runId"] not in before]
    idle = idle_cpu * (time.monotonic() - started)
    first = min(new, key=lambda run: float(run["creationTime"]))
    work = max(float(run["endTime"]) for run in new)
    return Flush(
        tables=len(tables),
        runs=len(new),
        sensor_secs=max(0.0, first["creationTime"] - due),
        queue_secs=first["stats"]["launchTime"] - first["creationTime"],
        start_secs=first["startTime"] - first["stats"]["launchTime"],
        work_secs=work - first["startTime"],
        cpu_secs=here.cpu_secs() - cpu - idle,
    )


def idle_cpu_rate(here: Platform) -> float:
    cpu, started = here.cpu_secs(), time.monotonic()
    time.sleep(IDLE_SECS)
    return (here.cpu_secs() - cpu) / (time.monotonic() - started)


def report(flushes: list[Flush], idle_cpu: float) -> Table:
    title = f"From threshold to committed; idle the platform takes {idle_cpu:.3f} of a core"
    table = Table(title=title)
    for heading in ("tables", "runs", "sensor s", "queue s", "run start s", "work s", "total s"):
        table.add_column(heading, justify="right")
    table.add_column("CPU-s", justify="right")
    table.add_column("CPU-s a table", justify="right")
    for flush in flushes:
        stretches = (flush.sensor_secs, flush.queue_secs, flush.start_secs, flush.work_secs)
        table.add_row(
            *(str(flush.tables), str(flush.runs)),
            *(f"{secs:.2f}" for secs in (*stretches, flush.secs)),
            *(f"{flush.cpu_secs:.2f}", f"{flush.cpu_secs / flush.tables:.2f}"),
        )
    return table


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Flushes of one table.")] = 3,
    tables: Annotated[int, typer.Option(min=2, help="Tables of the last measurement.")] = 10,
    engine: Annotated[str, typer.Option(help="arrow or spark")] = "arrow",
) -> None:
    """Measure what a flush costs."""
    try:
        with platform(engine) as here:
            measure(here, ["warm-up"], 0.0)
            idle_cpu = idle_cpu_rate(here)
            flushes = [measure(here, ["alone"], idle_cpu) for _ in range(rounds)]
            names = [f"together-{number}" for number in range(tables)]
            flushes.append(measure(here, names, idle_cpu))
    except BenchError as error:
        Console(stderr=True).print(f"bench failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    console = Console()
    console.width = max(console.width, 110)
    console.print(report(flushes, idle_cpu))


if __name__ == "__main__":
    typer.run(main)
