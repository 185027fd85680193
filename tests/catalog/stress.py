"""INV-11 under stress: live queries by every engine while all that moves events runs at once.

Writers send as fast as they get acks; flush, cleaning and, with Spark, compaction go on
without a pause; each engine queries the live view in a loop. Of each partition an answer must
hold every sequence from 1 to its last exactly once, and no fewer than were acked before the
query began. Run by hand for as long as wanted: `python -m tests.catalog.stress --seconds 300`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.catalog.tables import rest_catalog
from tests.catalog.writers import PARTITIONS, write
from tests.gateway import Gateway, running
from tests.spark import SparkServer
from zombi_platform.catalog.duckdb import attach, iceberg_duckdb
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings

REFUSED = "Cannot commit rewrite because of a ValidationException"
PHASE_SECS = 20.0

Answer = dict[int, tuple[int, int, int, int]]
"""By partition: count, distinct sequences, lowest, highest."""
Query = Callable[[str], Answer]

COUNTS = """
    SELECT partition, count(*), count(DISTINCT sequence), min(sequence), max(sequence)
    FROM live.zombi.{} GROUP BY partition
"""


@dataclass
class Tally:
    """What happened; `wrong` must stay empty."""

    queries: dict[str, int] = field(default_factory=dict)
    flushes: int = 0
    cleaned: int = 0
    merges: int = 0
    compactions: int = 0
    refused: int = 0
    """Compactions that gave up, because a merge had replaced what they were rewriting."""
    events: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        queries = ", ".join(f"{name} {count}" for name, count in self.queries.items())
        return (
            f"{self.events:,} events, {self.flushes} flushes, {self.cleaned:,} events cleaned, "
            f"{self.merges} merges, {self.compactions} compactions and {self.refused} refused; "
            f"queries: {queries}; wrong: {len(self.wrong)}"
        )


def stress(
    seconds: float, *, spark: SparkServer | None = None, phase_secs: float = PHASE_SECS
) -> Tally:
    """Run in phases, each with a table of its own, so that tables stay small enough to count."""
    tally = Tally()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zombi-stress-")))
        gateway = stack.enter_context(running(home, hot_retention_secs="0", lease_secs="5"))
        engines = {
            "pyiceberg": pyiceberg_query(gateway),
            "duckdb": stack.enter_context(duckdb_query(gateway)),
        }
        compact = None
        if spark is not None:
            engines["spark"], compact = stack.enter_context(spark_session(spark, gateway))
        # With Spark fewer merges, for its compactions lose against each of them.
        settings = Settings(
            data_dir=home,
            url=gateway.url,
            engine="arrow",
            merge_files_at=3 if spark is None else 10,
        )
        pipeline = stack.enter_context(Pipeline.opened(settings))
        phases = max(1, round(seconds / phase_secs))
        for number in range(phases):
            phase = Phase(gateway, f"stress{number}", tally)
            phase.run(seconds / phases, engines, pipeline, compact)
            if tally.wrong:
                break
    return tally


class Phase:
    """One table from its first event to its last."""

    def __init__(self, gateway: Gateway, table: str, tally: Tally) -> None:
        self._table = table
        self._tally = tally
        self._flushed = False
        # Not forked: this process has threads that hold locks.
        processes = multiprocessing.get_context("spawn")
        self._stopping = processes.Event()
        self._acked: SynchronizedArray[int] = processes.Array("q", PARTITIONS)
        self._writers = [
            processes.Process(
                target=write,
                args=(gateway.port, table, number, bulk, self._acked, self._stopping),
            )
            for number, bulk in enumerate((1, 50, 1000))
        ]

    def run(
        self,
        seconds: float,
        engines: dict[str, Query],
        pipeline: Pipeline,
        compact: Callable[[str], None] | None,
    ) -> None:
        for writer in self._writers:
            writer.start()
        while not all(self._acked):
            time.sleep(0.01)
        loops: list[tuple[Callable[..., None], Any]] = [
            (self._ask, (name, query)) for name, query in engines.items()
        ]
        loops.append((self._flush, (pipeline,)))
        if compact is not None:
            loops.append((self._compact, (compact,)))
        threads = [threading.Thread(target=self._loop, args=loop) for loop in loops]
        for thread in threads:
            thread.start()
        self._stopping.wait(seconds)
        self._stopping.set()
        for runner in (*self._writers, *threads):
            runner.join()
        for name, query in engines.items():
            self._check(name, query, whole=True)
        self._tally.events += sum(self._acked)

    def _loop(self, work: Callable[..., None], arguments: Sequence[Any]) -> None:
        while not self._stopping.is_set():
            try:
                work(*arguments)
            except Exception as error:
                self._tally.wrong.append(f"{work.__name__}{arguments[:1]}: {error!r}")
                self._stopping.set()

    def _ask(self, name: str, query: Query) -> None:
        self._check(name, query, whole=False)
        self._tally.queries[name] = self._tally.queries.get(name, 0) + 1

    def _check(self, name: str, query: Query, *, whole: bool) -> None:
        before = list(self._acked)
        answer = query(self._table)
        for partition, acked in enumerate(before):
            count, distinct, low, high = answer.get(partition, (0, 0, 1, 0))
            right = count == distinct == high and low == 1 and high >= acked
            if not right or (whole and high != acked):
                self._tally.wrong.append(
                    f"{name} on {self._table}/{partition}: {count} events, {distinct} distinct, "
                    f"sequences {low} to {high}; {acked} were acked before"
                )

    def _flush(self, pipeline: Pipeline) -> None:
        done = pipeline.flush(self._table)
        self._tally.flushes += 1
        self._tally.merges += done.merged_files > 0
        self._tally.cleaned += done.events
        self._flushed = True
        self._stopping.wait(0.5)

    def _compact(self, compact: Callable[[str], None]) -> None:
        if self._flushed:
            try:
                compact(self._table)
                self._tally.compactions += 1
            except Exception as error:
                if REFUSED not in str(error):
                    raise
                self._tally.refused += 1
        self._stopping.wait(2.0)


def pyiceberg_query(gateway: Gateway) -> Query:
    catalog = rest_catalog(gateway, "live")

    def ask(table: str) -> Answer:
        scan = catalog.load_table(f"zombi.{table}").scan(selected_fields=("partition", "sequence"))
        rows = scan.to_arrow().group_by("partition")
        wanted = [("sequence", how) for how in ("count", "count_distinct", "min", "max")]
        return {
            row.pop("partition"): tuple(row.values()) for row in rows.aggregate(wanted).to_pylist()
        }

    return ask


@contextmanager
def duckdb_query(gateway: Gateway) -> Iterator[Query]:
    with iceberg_duckdb() as connection:
        attach(connection, gateway.url, "live")
        yield lambda table: _by_partition(connection.execute(COUNTS.format(table)).fetchall())


@contextmanager
def spark_session(
    server: SparkServer, gateway: Gateway
) -> Iterator[tuple[Query, Callable[[str], None]]]:
    from tests.catalog.test_spark import Spark

    session = Spark(server.remote, gateway)
    compaction = (
        "CALL lake.system.rewrite_data_files(table => 'lake.zombi.{}', "
        "options => map('min-input-files', '2'))"
    )
    try:
        yield (
            lambda table: _by_partition(session.ask(COUNTS.format(table))),
            lambda table: session.ask(compaction.format(table)) and None,
        )
    finally:
        session.close()


def _by_partition(rows: Sequence[tuple[Any, ...]]) -> Answer:
    return {row[0]: (row[1], row[2], row[3], row[4]) for row in rows}


def main(
    seconds: Annotated[float, typer.Option(min=1)] = 300,
    spark: Annotated[bool, typer.Option(help="Query and compact with Spark too.")] = False,
) -> None:
    server = SparkServer(spark_master="local[2,3]") if spark else None
    try:
        tally = stress(seconds, spark=server)
    finally:
        if server is not None:
            server.stop()
    typer.echo(str(tally))
    for wrong in tally.wrong:
        typer.echo(wrong, err=True)
    raise typer.Exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
