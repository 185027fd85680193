"""`make bench-pipeline`: what it costs to bring events from the hot buffer into Iceberg.

A gateway takes the events, a warm worker flushes them with one engine after the other, and
all processes are counted: gateway, worker, and Spark with its Python workers. The clock runs
from the last ack to the commit.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from bench.processes import cpu_secs, rss_peak_mb
from bench.server import ZOMBI, BenchError, Server, environment, free_port, gateway, stop
from bench.workload import ARROW, PARTITIONS

MILLION = 1_000_000
BATCH = 50_000
PAYLOAD_BYTES = 200
HOURS = 3
HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
WARM_UP_EVENTS = 8 * BATCH
WARM_UPS = 3
TARGETS = {"arrow": 1.5, "spark": 3.0}
GATEWAY_MB_MAX = 500
WORKER_MB_MAX = 700


@dataclass(frozen=True)
class Measurement:
    """One engine; CPU-seconds are for a million events."""

    engine: str
    events: int
    files: int
    gateway_cpu: float
    worker_cpu: float
    spark_cpu: float
    ack_to_commit_secs: float
    gateway_mb: float
    worker_mb: float
    spark_mb: float

    @property
    def cpu(self) -> float:
        return self.gateway_cpu + self.worker_cpu + self.spark_cpu


class Worker:
    """The process that flushes."""

    def __init__(self, server: Server, home: Path, settings: dict[str, str]) -> None:
        settings = {
            "ZOMBI_URL": server.url,
            "ZOMBI_TOKEN": server.token or "",
            "ZOMBI_DATA_DIR": str(home / "data"),
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.pipeline_worker"],
            env=environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def flush(self, table: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(table.encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"the worker ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(engine: str, events: int, mode: str) -> Measurement:
    with (
        tempfile.TemporaryDirectory(prefix="zombi-bench-") as name,
        gateway(mode, Path(name)) as server,
        spark(engine) as (spark_pid, settings),
    ):
        worker = Worker(server, Path(name), settings)
        try:
            for number in range(WARM_UPS):
                send(server, f"warm{number}", WARM_UP_EVENTS)
                worker.flush(f"warm{number}")
            return measure_flush(engine, server, worker, spark_pid, events)
        finally:
            stop(worker.process)


def measure_flush(
    engine: str, server: Server, worker: Worker, spark_pid: int | None, events: int
) -> Measurement:
    send(server, "orders", events)
    acked = time.perf_counter()
    pids = [server.process.pid, worker.process.pid, *([spark_pid] if spark_pid else [])]
    before = [cpu_secs(pid) for pid in pids]
    done = worker.flush("orders")
    secs = time.perf_counter() - acked
    spent = [
        (cpu_secs(pid) - used) / events * MILLION for pid, used in zip(pids, before, strict=True)
    ]
    peaks = [rss_peak_mb(pid) for pid in pids]
    if done["events"] != events:
        raise BenchError(f"{done['events']} events were flushed, {events} were sent")
    return Measurement(
        engine=engine,
        events=events,
        files=done["files"],
        gateway_cpu=spent[0],
        worker_cpu=spent[1],
        spark_cpu=sum(spent[2:]),
        ack_to_commit_secs=secs,
        gateway_mb=peaks[0],
        worker_mb=peaks[1],
        spark_mb=sum(peaks[2:]),
    )


@contextmanager
def spark(engine: str) -> Iterator[tuple[int | None, dict[str, str]]]:
    """The settings for the engine, and the pid of its server if it has one."""
    settings = {"ZOMBI_ENGINE": engine}
    if engine != "spark":
        yield None, settings
        return
    settings["ZOMBI_SPARK_PORT"] = str(free_port())
    process = subprocess.Popen(
        [str(ZOMBI), "spark"], env=environment(settings), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise BenchError(f"zombi spark ended with code {process.wait()}")
        yield process.pid, settings
    finally:
        stop(process)


def send(server: Server, table: str, events: int) -> None:
    """Events of 200 bytes in four partitions, nearly in order over three hours."""
    rng = np.random.default_rng(1)
    headers = server.headers | {"Content-Type": ARROW}
    payloads = [pa.array(map(payload, rng.integers(0, 2**40, BATCH).tolist())) for _ in range(4)]
    with httpx.Client(headers=headers, timeout=60) as client:
        for number, first in enumerate(range(0, events, BATCH)):
            stamps = START_MS + np.arange(first, first + BATCH) * HOURS * HOUR_MS // events
            batch = pa.record_batch(
                {
                    "payload": payloads[number % len(payloads)],
                    "partition": pa.array(np.arange(BATCH) % PARTITIONS, pa.uint32()),
                    "timestamp_ms": pa.array(stamps),
                }
            )
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            answer = client.post(
                f"{server.url}/tables/{table}/bulk", content=sink.getvalue().to_pybytes()
            )
            if not answer.is_success:
                raise BenchError(f"a bulk was answered {answer.status_code}: {answer.text[:200]}")


def payload(number: int) -> bytes:
    fields = (
        f'{{"order_id":"{number:012x}","user_id":{number % 1_000_003},'
        f'"sku":"SKU-{number % 4999:05d}","price_cents":{number % 99_991},"currency":"EUR",'
        f'"session":"{number * 2_654_435_761 % 2**64:016x}",'
        '"agent":"Mozilla/5.0 (X11; Linux)","pad":"'
    )
    return (fields.ljust(PAYLOAD_BYTES - 2, "x") + '"}').encode()


def report(measurements: list[Measurement]) -> Table:
    table = Table(title="From hot to committed: CPU-seconds per million events of 200 bytes")
    for heading in ("engine", "events", "files", "gateway", "worker", "Spark", "all", "target"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for heading in ("ack to commit s", "gateway MB", "worker MB", "Spark MB"):
        table.add_column(heading, justify="right")
    for m in measurements:
        table.add_row(
            m.engine,
            f"{m.events:,}",
            str(m.files),
            f"{m.gateway_cpu:.2f}",
            f"{m.worker_cpu:.2f}",
            f"{m.spark_cpu:.2f}",
            colored(f"{m.cpu:.2f}", good=m.cpu <= TARGETS[m.engine]),
            f"≤ {TARGETS[m.engine]:.1f}",
            f"{m.ack_to_commit_secs:.1f}",
            colored(f"{m.gateway_mb:.0f}", good=m.gateway_mb < GATEWAY_MB_MAX),
            colored(f"{m.worker_mb:.0f}", good=m.worker_mb < WORKER_MB_MAX),
            f"{m.spark_mb:.0f}",
        )
    return table


def colored(figure: str, *, good: bool) -> str:
    return f"[green]{figure}[/]" if good else f"[red]{figure}[/]"


def main(
    million_events: Annotated[float, typer.Option(min=0.2, help="Events, in millions.")] = 1,
    engine: Annotated[list[str] | None, typer.Option(help="arrow or spark; repeatable.")] = None,
    mode: Annotated[str, typer.Option(help="Durability of the gateway.")] = "fsync",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Measure the way from the hot buffer to Iceberg with each engine."""
    events = round(million_events * MILLION / BATCH) * BATCH
    try:
        measurements = [measure(name, events, mode) for name in engine or list(TARGETS)]
    except BenchError as error:
        Console(stderr=True).print(f"bench failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        Console().print_json(json.dumps([asdict(m) for m in measurements]))
    else:
        console = Console()
        console.width = max(console.width, 130)
        console.print(report(measurements))


if __name__ == "__main__":
    typer.run(main)
