"""A small worker for tests: does the steps of a flush one by one through the real routes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from tests.gateway import Gateway
from tests.lake.staging import HOUR, stage_file
from zombi_platform.client.pipeline import PipelineClient
from zombi_platform.cuts import Cut, CutState, Split, StagedFile
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


@dataclass
class Worker:
    """Works on one table; `epoch` is its lease's once it has one."""

    gateway: Gateway
    data_dir: Path
    table: str = "orders"
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    warehouse: str | None = None
    token: str | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self.client = PipelineClient(self.gateway.url, self.token)
        self.lake = Lake(Settings(data_dir=self.data_dir, warehouse=self.warehouse))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def write(self, count: int = 10, partitions: int = 2) -> None:
        records = [{"payload": "x" * 50, "partition": n % partitions} for n in range(count)]
        answer = httpx.post(
            f"{self.gateway.url}/tables/{self.table}/bulk", json={"records": records}
        )
        answer.raise_for_status()

    def lease(self) -> int:
        self.epoch = self.client.lease(self.table, self.name).epoch
        return self.epoch

    def open_cut(self) -> Cut:
        cut = self.client.open_cut(self.table, self.epoch)
        assert cut is not None
        return cut

    def write_files(self, cut: Cut, split: Split) -> list[StagedFile]:
        """Announce and write the files of a split, named so that no two are alike."""
        directory = {
            part.partition: self.lake.storage.hour_directory(self.table, HOUR, part.partition)
            for part in split.ranges
        }
        name = f"{cut.id:08d}-{split.number:05d}-{uuid.uuid4().hex[:8]}"
        paths = [f"{directory[part.partition]}/{name}.parquet" for part in split.ranges]
        self.client.intend(self.table, self.epoch, cut.id, split.number, paths)
        return [
            stage_file(self.lake.storage, self.table, name, split.number, part, HOUR)
            for part in split.ranges
        ]

    def stage(self, cut: Cut) -> None:
        for split in cut.missing:
            with self.client.read_split(self.table, cut.id, split.number) as batches:
                assert sum(batch.num_rows for batch in batches) == split.events
            files = self.write_files(cut, split)
            self.client.report_split(self.table, self.epoch, cut.id, split.number, files)

    def commit(self) -> list[int]:
        """Commit what is staged to the lake and report it."""
        cuts = [cut for cut in self.client.cuts(self.table) if cut.state is CutState.STAGED]
        if not cuts:
            return []
        self.lake.commit(self.table, cuts, before_write=self.announce)
        ids = [cut.id for cut in cuts]
        self.client.report_commit(self.table, self.epoch, ids)
        return ids

    def announce(self, paths: list[str], prefixes: list[str]) -> None:
        self.client.add_tombstones(self.table, self.epoch, paths, prefixes)

    def flush(self) -> None:
        """All of it, repeated until nothing is left in the hot buffer."""
        self.lease()
        while (cut := self.client.open_cut(self.table, self.epoch)) is not None:
            self.stage(cut)
        self.commit()
        self.client.clean(self.table, self.epoch)
