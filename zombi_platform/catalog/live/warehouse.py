"""The `live` warehouse: every acked event, committed or still hot, exactly once (INV-11).

A load looks at the lake first and at the hot buffer after it, so that every event acked
before the load is in one of them. Hot rows past the lake's watermarks are staged as blocks;
blocks of earlier loads are used again. If cleaning takes rows away between the two looks,
they are in the lake by then, and the load starts over. The lake is never changed, except
that the first load of a new table makes the empty table.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from zombi_platform.catalog.live.blocks import (
    BLOCK_AGE_SECS_MAX,
    Block,
    CoverError,
    Hot,
    Plan,
    check_cover,
    plan_blocks,
)
from zombi_platform.catalog.live.graves import Graves
from zombi_platform.catalog.live.messages import Forget, Publish, Stage
from zombi_platform.catalog.live.process import StagerDiedError, StagingProcess
from zombi_platform.catalog.live.turns import Turns
from zombi_platform.catalog.warehouse import LakeWarehouse, LoadedTable, Snapshots, no_table
from zombi_platform.cuts import Range
from zombi_platform.errors import LakeConflictError, NotFoundError, TransientError
from zombi_platform.hot import HotBuffer
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.state import LakeState, check_lineage, read_state

TRIES: Final = 5
DIRECTORY: Final = "_live"

T = TypeVar("T")

log = logging.getLogger("zombi.live")


class RowsGoneError(TransientError):
    """Rows that were to be staged have been cleaned: they are in the lake by now."""

    code = "LIVE_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class _Published:
    """The last snapshot of a table: the etag of its base, its blocks, and its own files."""

    base: str
    blocks: tuple[Block, ...]
    files: tuple[str, ...]
    loaded: LoadedTable
    made_at: float

    def serves(self, base: LoadedTable, plan: Plan, now: float) -> bool:
        """Whether it is what a load at this moment would make, and its files are young."""
        return (
            not plan.missing
            and (self.base, self.blocks) == (base.etag, plan.kept)
            and now - self.made_at <= BLOCK_AGE_SECS_MAX
        )


@dataclass(slots=True)
class _View:
    """What is known of one table; blocks may be staged that no snapshot has yet."""

    turns: Turns[LoadedTable]
    base: str | None = None
    """The etag that `state` belongs to."""
    state: LakeState | None = None
    blocks: tuple[Block, ...] = ()
    published: _Published | None = None


class LiveWarehouse:
    """Made and used in the gateway's event loop; one thread talks to the staging process."""

    def __init__(
        self,
        lake: Lake,
        committed: LakeWarehouse,
        hot: HotBuffer,
        on_staged: Callable[[int], None] | None = None,
    ) -> None:
        self._lake = lake
        self._committed = committed
        self._hot = hot
        self._on_staged = on_staged
        self._process = StagingProcess(lake.storage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._views: dict[str, _View] = {}
        self._graves = Graves(lake.storage, lake.grace_secs, self._directories)

    def expect_loads(self) -> None:
        """A client has come; get ready while it makes up its mind."""
        self._thread.submit(self._process.warm_up)

    async def tables(self) -> list[str]:
        return sorted(self._hot_tables().union(await self._committed.tables()))

    async def exists(self, table: str) -> bool:
        return bool(self._hot.partitions.known(table)) or await self._committed.exists(table)

    async def load(self, table: str, snapshots: Snapshots = "all") -> LoadedTable:
        """The table with every event that was acked before this call.

        It has one snapshot, which `main` names, so it is the same whichever are asked for.
        """
        if not await self.exists(table):
            raise no_table(table)
        if table not in self._views:
            self._views[table] = _View(Turns(lambda: self._build(table)))
        return await self._views[table].turns.next()

    async def close(self) -> None:
        await self._graves.close()
        await self._in_thread(self._process.close)
        self._thread.shutdown()

    # Building a snapshot

    async def _build(self, table: str) -> LoadedTable:
        view = self._views[table]
        for attempt in range(1, TRIES + 1):
            try:
                return await self._build_once(table, view)
            except (CoverError, RowsGoneError, StagerDiedError) as error:
                if attempt == TRIES:
                    raise
                log.info("the live view of %s is made anew: %s", table, error)
        raise AssertionError("the last try returns or raises")

    async def _build_once(self, table: str, view: _View) -> LoadedTable:
        base = await self._base(table)
        if view.state is None or view.base != base.etag:
            view.base, view.state = base.etag, read_state(table, base.location, base.content)
        state = view.state
        check_lineage(state)
        hot = self._look(table, state)
        now = time.monotonic()
        plan = plan_blocks(view.blocks, state.watermarks, hot, now)
        before = view.published
        if before is not None and before.serves(base, plan, now):
            return before.loaded
        await self._retire(view, plan.kept)
        for ranges in plan.missing:
            block = await self._stage(table, ranges)
            # Read after the wait: if the staging process died meanwhile, they are gone.
            view.blocks = (*view.blocks, block)
        highs = {member.partition: member.last for member in hot}
        check_cover(view.blocks, state.watermarks, highs)
        if not view.blocks and state.snapshot_id is None:
            return base
        view.published = await self._publish(table, base, view.blocks)
        if before is not None:
            self._graves.add(before.files)
        return view.published.loaded

    async def _base(self, table: str) -> LoadedTable:
        """The committed table, made if it is new."""
        try:
            return await self._committed.load(table)
        except NotFoundError as error:
            if any(member.flushed for member in self._hot.partitions.known(table)):
                raise LakeConflictError(
                    f"table {table!r} is gone from the catalog, though events were committed to "
                    "it: put it back, for example by registering its last metadata file",
                    code="TABLE_DROPPED",
                ) from error
        await asyncio.to_thread(self._lake.ensure_table, table)
        return await self._committed.load(table)

    def _look(self, table: str, state: LakeState) -> list[Hot]:
        """The hot buffer at this moment; raises if it has lost rows that the base lacks."""
        found = []
        for member in self._hot.partitions.known(table):
            watermark = state.watermarks.get(member.number, 0)
            if member.last > watermark and member.first > watermark + 1:
                raise RowsGoneError(
                    f"partition {member.number} is committed up to {watermark} in "
                    f"{state.metadata_location} and hot from {member.first} on"
                )
            size = member.bytes // max(member.events, 1)
            found.append(Hot(member.number, member.last, member.cut, size))
        return found

    async def _retire(self, view: _View, kept: Sequence[Block]) -> None:
        """Let go of blocks that no snapshot to come will hold."""
        dropped = tuple(block.location for block in view.blocks if block not in kept)
        view.blocks = tuple(kept)
        if dropped:
            self._graves.add(dropped)
            await self._in_thread(self._process.forget, Forget(dropped))

    async def _stage(self, table: str, ranges: tuple[Range, ...]) -> Block:
        location = f"{self._directory(table)}/{secrets.token_hex(16)}.parquet"
        await self._in_thread(self._stage_now, Stage(table, location, ranges))
        block = Block(location, ranges, time.monotonic())
        if self._on_staged is not None:
            self._on_staged(block.events)
        return block

    def _stage_now(self, request: Stage) -> None:
        try:
            self._process.stage(request, self._rows(request))
        except NotFoundError as error:
            raise RowsGoneError(str(error)) from error

    def _rows(self, request: Stage) -> Iterator[pa.RecordBatch]:
        for part in request.ranges:
            yield from self._hot.scan(request.table, part.partition, part.first, part.last)

    async def _publish(
        self, table: str, base: LoadedTable, blocks: tuple[Block, ...]
    ) -> _Published:
        locations = tuple(block.location for block in blocks)
        snapshot_id = _snapshot_id(base.etag, locations)
        # Not by the id alone: the files of the same snapshot, made earlier, may be dying.
        name = f"{snapshot_id}-{secrets.token_hex(8)}"
        request = Publish(
            table=table,
            base=base.location,
            etag=base.etag,
            directory=self._directory(table),
            name=name,
            snapshot_id=snapshot_id,
            blocks=locations,
        )
        made, content = await self._in_thread(self._process.publish, request)
        loaded = LoadedTable(made.location, content, f'"{name}"')
        return _Published(base.etag, blocks, made.files, loaded, time.monotonic())

    # Names and threads

    def _directory(self, table: str) -> str:
        return f"{self._lake.storage.table_location(table)}/{DIRECTORY}"

    def _directories(self) -> list[str]:
        return [self._directory(table) for table in self._hot_tables().union(self._views)]

    def _hot_tables(self) -> set[str]:
        return {summary.table for summary in self._hot.tables()}

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except StagerDiedError:
            # Nobody else knows what is in the blocks.
            for view in self._views.values():
                self._graves.add([block.location for block in view.blocks])
                view.blocks = ()
            raise


def _snapshot_id(base: str, blocks: Sequence[str]) -> int:
    """The same for the same base and blocks; positive and never 0."""
    digest = hashlib.sha256("\n".join((base, *blocks)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 | 1
