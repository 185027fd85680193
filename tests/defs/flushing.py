"""A gateway, a lake on a local disk and the definitions over both, for tests in one process."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import httpx

from tests.gateway import Gateway, running
from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.defs.assembly import assemble
from zombi_platform.lake.lake import Lake
from zombi_platform.progress import TableProgress
from zombi_platform.settings import Settings

HOUR_MS = 3_600_000


@dataclass(frozen=True)
class World:
    gateway: Gateway
    settings: Settings
    definitions: dg.Definitions
    instance: dg.DagsterInstance

    def send(self, table: str, count: int, *, partitions: int = 1, hours: int = 1) -> None:
        """Events spread over partitions and over the hours up to now."""
        now_ms = time.time_ns() // 1_000_000
        records = [
            {
                "payload": f"{table}-{number}".ljust(100, "."),
                "partition": number % partitions,
                "timestamp_ms": now_ms - (number % hours) * HOUR_MS,
            }
            for number in range(count)
        ]
        answer = httpx.post(
            f"{self.gateway.url}/tables/{table}/bulk", json={"records": records}, timeout=60
        )
        assert answer.status_code == 202, answer.text

    def client(self) -> PipelineClient:
        return PipelineClient(self.gateway.url)

    def progress(self, table: str) -> TableProgress:
        with self.client() as client:
            (found,) = (known for known in client.tables() if known.table == table)
        return found

    def flush(self, table: str, **arguments: object) -> dg.ExecuteInProcessResult:
        self.instance.add_dynamic_partitions("tables", [table])
        job = self.definitions.resolve_job_def("flush")
        return job.execute_in_process(
            partition_key=table, instance=self.instance, raise_on_error=False, **arguments
        )

    def rows(self, table: str) -> Counter[tuple[int, int]]:
        """How often each (partition, sequence) is in the lake."""
        found = Lake(self.settings).load(table)
        assert found is not None
        rows = found[0].scan(selected_fields=("partition", "sequence")).to_arrow()
        return Counter(
            zip(rows["partition"].to_pylist(), rows["sequence"].to_pylist(), strict=True)
        )


@contextmanager
def world(tmp_path: Path, **settings: str) -> Iterator[World]:
    home = tmp_path / "home"
    with running(home, **settings) as gateway:
        environ = {"ZOMBI_URL": gateway.url, "ZOMBI_DATA_DIR": str(home), "ZOMBI_ENGINE": "arrow"}
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        known = Settings.from_env(environ)
        with dg.DagsterInstance.ephemeral() as instance:
            yield World(gateway, known, assemble(known, datetime.now(UTC)), instance)


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, object]:
    """The values of an asset's only materialization in a run."""
    (found,) = result.asset_materializations_for_node(asset)
    return {name: value.value for name, value in found.metadata.items()}


def hide(table: Path) -> Path:
    """Take a table out of a lake on disk, as somebody might who drops it."""
    away = table.with_name(f"{table.name}.away")
    shutil.move(table, away)
    return away


def put_back(table: Path, away: Path) -> None:
    """Undo that, and keep what was staged meanwhile."""
    if table.exists():
        shutil.copytree(table, away, dirs_exist_ok=True)
        shutil.rmtree(table)
    shutil.move(away, table)
