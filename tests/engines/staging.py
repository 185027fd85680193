"""A gateway with events, and what a worker does to have an engine stage them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import duckdb
import httpx
import numpy as np
import pyarrow as pa

from tests.gateway import Gateway
from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import Cut, Split, StagedFile
from zombi_platform.engines import Engine, SplitResult, StagingJob
from zombi_platform.lake.storage import Storage, local_location

TABLE = "orders"
HOUR_MS = 3_600_000
NOON = 1_700_000_000_000 // HOUR_MS * HOUR_MS
ARROW = "application/vnd.apache.arrow.stream"

Event = tuple[int, int, int, bytes, str | None]
"""partition, sequence, timestamp_ms, payload, idempotency key"""


class Staging:
    """One worker of one table: its lease, its cut, and the files it finds in the lake."""

    def __init__(self, gateway: Gateway, lake: Path) -> None:
        self.gateway = gateway
        self.lake = lake
        self.storage = Storage(local_location(lake))
        self.client = PipelineClient(gateway.url)
        self.acked: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def send(
        self, partition: int, stamps: Sequence[int], keys: Sequence[str | None] | None = None
    ) -> None:
        """Events of one partition, remembered with the sequences that they get."""
        last = max((event[1] for event in self.acked if event[0] == partition), default=0)
        payloads = [b"%d/%d" % (partition, last + n) for n in range(1, len(stamps) + 1)]
        rows = pa.table(
            {
                "payload": pa.array(payloads, pa.binary()),
                "partition": pa.array([partition] * len(stamps), pa.uint32()),
                "timestamp_ms": pa.array(stamps, pa.int64()),
                "idempotency_key": pa.array(keys or [None] * len(stamps), pa.string()),
            }
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        httpx.post(
            f"{self.gateway.url}/tables/{TABLE}/bulk",
            content=sink.getvalue().to_pybytes(),
            headers={"Content-Type": ARROW},
        ).raise_for_status()
        for n, (stamp, payload) in enumerate(zip(stamps, payloads, strict=True)):
            self.acked.append((partition, last + n + 1, stamp, payload, (keys or {n: None})[n]))

    def send_mixed(self) -> None:
        """Three partitions over three hours, in no order of time, some with keys."""
        rng = np.random.default_rng(5)
        for partition in (0, 3, 4_000_000_000):
            stamps = (NOON + rng.integers(0, 3 * HOUR_MS, 1200)).tolist()
            self.send(partition, stamps, [f"k{n}" if n % 3 else None for n in range(1200)])

    def open(self, holder: str = "worker") -> tuple[Cut, StagingJob]:
        epoch = self.client.lease(TABLE, holder).epoch
        cut = self.client.open_cut(TABLE, epoch)
        assert cut is not None
        return cut, StagingJob(self.gateway.url, None, TABLE, cut.id, epoch, self.storage)

    def cut(self) -> Cut:
        """The table's only cut, as the gateway has it now."""
        [cut] = self.client.cuts(TABLE)
        return cut

    def files_on_disk(self) -> set[str]:
        return {local_location(path) for path in self.lake.rglob("*") if path.is_file()}

    def rows(self, file: StagedFile) -> list[Any]:
        with duckdb.connect() as connection:
            return connection.execute(
                "select partition, sequence, timestamp_ms, payload, idempotency_key "
                "from read_parquet(?, hive_partitioning=false)",
                [self.storage.path(file.path)],
            ).fetchall()


def stage(engine: Engine, job: StagingJob, splits: Sequence[Split]) -> list[SplitResult]:
    told: list[SplitResult] = []
    engine.stage(job, splits, told.append)
    return told
