"""The live view while events move: right at every step of a flush, and between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from pyiceberg.catalog import Catalog

from tests.catalog.tables import HTTP, rest_catalog, table_url
from tests.gateway import running
from tests.lake.staging import HOUR, Tombstones, merge, stage
from tests.test_hot_buffer import append, opened, segment
from tests.worker import Worker
from zombi_platform.catalog.live.warehouse import LiveWarehouse, RowsGoneError
from zombi_platform.catalog.warehouse import LakeWarehouse, LoadedTable, Snapshots
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.hot import HotBuffer
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

TABLE = "orders"


def places(catalog: Catalog) -> list[tuple[int, int]]:
    """Partition and sequence of every row that a live query finds, sorted."""
    rows = catalog.load_table(f"zombi.{TABLE}").scan(selected_fields=("partition", "sequence"))
    found = rows.to_arrow()
    return sorted(zip(found["partition"].to_pylist(), found["sequence"].to_pylist(), strict=True))


def test_every_step_of_a_flush_shows_each_event_once(tmp_path: Path) -> None:
    settings = {"hot_retention_secs": "0", "lease_secs": "600", "durability": "wal"}
    with running(tmp_path, **settings) as gateway, Worker(gateway, tmp_path) as worker:
        catalog, last = rest_catalog(gateway, "live"), 0

        def write_and_check() -> None:
            nonlocal last
            worker.write(6)
            last += 3
            assert places(catalog) == [(p, n) for p in (0, 1) for n in range(1, last + 1)]

        worker.lease()
        for _ in range(2):
            write_and_check()
            cut = worker.open_cut()
            write_and_check()
            worker.stage(cut)
            write_and_check()
            [staged] = worker.client.cuts(TABLE)
            worker.lake.commit(TABLE, [staged], before_write=worker.announce)
            # Committed and hot at the same time, and the gateway does not know it yet.
            write_and_check()
            worker.client.report_commit(TABLE, worker.epoch, [cut.id])
            write_and_check()
            assert worker.client.clean(TABLE, worker.epoch).deleted_events
            write_and_check()
        lake = Lake(Settings(data_dir=tmp_path, merge_files_at=2))
        plan = lake.plan_merge(TABLE)
        assert plan is not None
        merged = merge(lake.storage, plan)
        write_and_check()
        assert lake.replace(plan, merged, before_write=worker.announce) is not None
        write_and_check()


def test_a_table_that_was_rolled_back_or_dropped_has_no_live_view(tmp_path: Path) -> None:
    with running(tmp_path, hot_retention_secs="0") as gateway, Worker(gateway, tmp_path) as worker:
        for _ in range(2):
            worker.write(4)
            worker.flush()
        url = table_url(gateway, warehouse="live")
        assert HTTP.get(url).status_code == 200
        table = rest_catalog(gateway).load_table(f"zombi.{TABLE}")
        first, second = (snapshot.snapshot_id for snapshot in table.metadata.snapshots)
        table.manage_snapshots().set_current_snapshot(first).commit()
        refused = HTTP.get(url)
        assert refused.status_code == 500
        assert "rolled back" in refused.json()["error"]["message"]
        table.refresh().manage_snapshots().set_current_snapshot(second).commit()
        assert HTTP.get(url).status_code == 200
        worker.lake.catalog.drop_table(("zombi", TABLE))
        assert "gone from the catalog" in HTTP.get(url).json()["error"]["message"]


class InterruptedWarehouse(LakeWarehouse):
    """Lets somebody act after a look at the lake and before the look at the hot buffer."""

    def __init__(self, lake: Lake, act: Callable[[], Awaitable[None]], times: int) -> None:
        super().__init__(lake)
        self._act = act
        self._left = times

    async def load(self, table: str, snapshots: Snapshots = "all") -> LoadedTable:
        loaded = await super().load(table, snapshots)
        if self._left:
            self._left -= 1
            await self._act()
        return loaded


class World:
    """A gateway's parts in this process, with a flush that takes one call."""

    def __init__(self, settings: Settings, hot: HotBuffer) -> None:
        self.hot = hot
        self.lake = Lake(settings)
        self.view = LakeView(self.lake)
        self.pipeline = Pipeline(settings, hot, self.view)

    async def write(self) -> None:
        await append(self.hot, TABLE, segment([b"x"] * 5))

    async def flush(self, *, clean: bool) -> None:
        """Commit everything that is hot now, and delete it if wanted."""
        cuts, epoch = self.pipeline.cuts, await self.pipeline.leases.take(TABLE, "worker", None)
        cut_id = await cuts.open(TABLE, epoch, self.pipeline.split_limits(TABLE))
        assert cut_id is not None
        [cut] = await cuts.read(TABLE, [cut_id])
        staged = stage(self.lake.storage, TABLE, cut.id, *cut.ranges, hour=HOUR)
        await cuts.intend(TABLE, epoch, cut.id, 0, [file.path for file in staged.files])
        await cuts.report(TABLE, epoch, cut.id, 0, staged.files)
        done = self.lake.commit(TABLE, [staged], before_write=Tombstones())
        await cuts.commit(TABLE, epoch, {cut.id: done.snapshot_id})
        if clean:
            await cuts.clean(TABLE, epoch, [cut.id])
        await self.pipeline.leases.release(TABLE, epoch)


def run_interrupted(
    tmp_path: Path, act: Callable[[World], Awaitable[None]], times: int = 1
) -> int | Exception:
    """Records of a live load during which somebody acts; ten were acked before it."""

    async def scenario() -> int | Exception:
        settings = Settings(data_dir=tmp_path, durability="wal")
        async with opened(settings) as hot:
            world = World(settings, hot)
            await world.write()
            await world.flush(clean=True)
            await world.write()
            committed = InterruptedWarehouse(world.lake, lambda: act(world), times)
            live = LiveWarehouse(world.lake, committed, hot)
            try:
                loaded = await live.load(TABLE)
                [snapshot] = msgspec.json.decode(loaded.content)["snapshots"]
                return int(snapshot["summary"]["total-records"])
            except RowsGoneError as error:
                return error
            finally:
                await live.close()
                committed.close()
                world.view.close()

    return asyncio.run(scenario())


def test_a_commit_between_the_two_looks_counts_events_once(tmp_path: Path) -> None:
    assert run_interrupted(tmp_path, lambda world: world.flush(clean=False)) == 10


def test_a_cleaning_between_the_two_looks_loses_no_event(tmp_path: Path) -> None:
    assert run_interrupted(tmp_path, lambda world: world.flush(clean=True)) == 10


def test_events_that_come_between_the_two_looks_are_seen(tmp_path: Path) -> None:
    assert run_interrupted(tmp_path, lambda world: world.write()) == 15


def test_a_lake_that_stays_behind_the_hot_buffer_is_an_error(tmp_path: Path) -> None:
    async def write_and_flush(world: World) -> None:
        await world.write()
        await world.flush(clean=True)

    outcome = run_interrupted(tmp_path, write_and_flush, times=100)
    assert isinstance(outcome, RowsGoneError)
