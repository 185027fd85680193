"""Confirming sequences against the lake before they are given out.

A new data directory takes no write before the lake has told how far its tables have come.
After that only a table that is new here is asked for, on its first write, while others go
on. Known tables are confirmed at each start, and writes to them wait a moment for it; when
the lake does not answer they go on, because what was cut is durable here in any case.
What the lake holds of staged cuts, whose outcome was lost, is recorded on the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from typing import Final

from zombi_platform.errors import LakeUnavailableError, ZombiError
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.hot import Append, HotBuffer
from zombi_platform.hot.sequences import Ahead, Sequences
from zombi_platform.lake.state import LakeState

WAIT_SECS: Final = 5.0
"""How long the first write to a table waits for the lake before it is told to retry."""
KNOWN_WAIT_SECS: Final = 2.0
"""How long writes to known tables wait for it at the start before they go on without."""
RETRY_FIRST_SECS: Final = 0.5
RETRY_MOST_SECS: Final = 30.0
TABLES_MAX: Final = 256
"""Tables that are being confirmed at once; more are told to retry."""

log = logging.getLogger("zombi.gateway")


class Confirmation:
    """Admits writes by table. Made and used in one event loop."""

    def __init__(self, hot: HotBuffer, pipeline: Pipeline, lake: LakeView) -> None:
        self._hot = hot
        self._pipeline = pipeline
        self._lake = lake
        self._sequences = Sequences(hot)
        self._blocked: dict[str, ZombiError] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._holds: set[asyncio.Task[None]] = set()
        self._trouble: ZombiError | None = None
        self._moved = asyncio.Condition()
        self._deciding = asyncio.Lock()
        """Held while sequences are moved, which no write may see half done."""
        self.open: set[str] = set()
        """Tables that take writes; the same object for as long as this lives."""
        known = [name for name, members in hot.partitions.tables.items() if members]
        if self._sequences.marked:
            self._start = asyncio.create_task(self._confirm_known(known))
        else:
            self._start = asyncio.create_task(self._seed())

    @property
    def problem(self) -> str | None:
        """Why a new data directory takes no writes yet."""
        if self._sequences.marked:
            return None
        why = "it has not answered yet" if self._trouble is None else str(self._trouble)
        return f"sequences of a new data directory are not confirmed by the lake: {why}"

    def hold(self, append: Append) -> None:
        """Submit a write once its table is confirmed; the caller bounds how many there are."""
        task = asyncio.create_task(self._submit_later(append))
        self._holds.add(task)
        task.add_done_callback(self._holds.discard)

    async def close(self) -> None:
        tasks = [self._start, *self._tasks.values(), *self._holds]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit_later(self, append: Append) -> None:
        try:
            await self._confirmed(append.table)
        except ZombiError as error:
            append.done(append, error)
        else:
            self._hot.submit(append)

    async def _confirmed(self, table: str) -> None:
        """Return when the table takes writes; raise when it is not going to soon."""
        full = len(self._hot.partitions.tables) >= self._pipeline.settings.max_tables
        if full and table not in self._hot.partitions.tables and self._sequences.marked:
            return  # the hot buffer refuses it
        if table in self._blocked:
            raise self._blocked[table]
        try:
            async with asyncio.timeout(WAIT_SECS):
                if not self._sequences.marked:
                    await asyncio.shield(self._start)
                self._confirming(table)
                async with self._moved:
                    await self._moved.wait_for(lambda: self._decided(table))
        except TimeoutError as error:
            raise LakeUnavailableError(
                f"the first write to table {table!r} must know how far it has come in the lake, "
                f"which does not answer: {self._trouble or 'no answer yet'}; see "
                "ZOMBI_CATALOG, ZOMBI_WAREHOUSE and ZOMBI_S3_BUCKET",
                retry_after_secs=2,
            ) from error
        if table in self._blocked:
            raise self._blocked[table]

    def _decided(self, table: str) -> bool:
        return table in self.open or table in self._blocked

    def _confirming(self, table: str) -> None:
        """See to it that the table is being confirmed, unless that is decided."""
        if table in self._tasks or self._decided(table):
            return
        if len(self._tasks) >= TABLES_MAX:
            raise LakeUnavailableError(
                f"{TABLES_MAX} tables are being confirmed against the lake; retry shortly"
            )
        self._tasks[table] = asyncio.create_task(self._confirm_patiently(table))

    async def _seed(self) -> None:
        """Learn of every table in the lake, then mark the data directory."""
        wait = RETRY_FIRST_SECS
        while not self._sequences.marked:
            try:
                for table in await self._lake.tables():
                    await self._confirm(table)
                await self._sequences.mark()
            except ZombiError as error:
                self._note(error, "new sequences")
                await asyncio.sleep(wait)
                wait = min(wait * 2, RETRY_MOST_SECS)
        self._trouble = None

    async def _confirm_known(self, known: list[str]) -> None:
        for table in known:
            self._tasks[table] = asyncio.create_task(self._confirm_patiently(table))
        await asyncio.sleep(KNOWN_WAIT_SECS)
        async with self._deciding:
            await self._admit(set(known) - self._blocked.keys())

    async def _admit(self, tables: Set[str]) -> None:
        self.open.update(tables)
        async with self._moved:
            self._moved.notify_all()

    async def _confirm_patiently(self, table: str) -> None:
        wait = RETRY_FIRST_SECS
        while True:
            try:
                await self._confirm(table)
                break
            except ZombiError as error:
                self._note(error, f"table {table!r}")
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_MOST_SECS)
        del self._tasks[table]

    def _note(self, error: ZombiError, what: str) -> None:
        if str(error) != str(self._trouble):
            log.warning("%s cannot be confirmed in the lake: %s", what, error)
        self._trouble = error

    async def _confirm(self, table: str) -> None:
        state = await self._lake.state(table)
        if state is not None:
            await self._pipeline.reconcile(table, state)
            async with self._deciding:
                ahead = await self._catch_up(table, state)
                if ahead:
                    self._block(table, ahead[0])
                    await self._admit(set())
                    return
        await self._admit({table})

    async def _catch_up(self, table: str, state: LakeState) -> list[Ahead]:
        ids = [cut for snapshot in state.lineage for cut in snapshot.cuts]
        await self._pipeline.cuts.begin_above(table, max(ids, default=0))
        if table in self.open:
            # It took writes meanwhile, so its sequences may not be moved under them.
            members = self._hot.partitions.known(table)
            flushed = {member.number: member.flushed for member in members}
            return [
                Ahead(number, mark, flushed.get(number, 0), mark)
                for number, mark in state.watermarks.items()
                if mark > flushed.get(number, 0)
            ]
        return await self._sequences.continue_above(table, state.watermarks)

    def _block(self, table: str, ahead: Ahead) -> None:
        """Two histories of one table: only a person knows which events are which."""
        error = LakeUnavailableError(
            f"table {table!r} takes no writes: partition {ahead.partition} is committed up to "
            f"{ahead.watermark} in the lake, but only up to {ahead.flushed} by this data "
            "directory, which is older than the lake or belongs to another one. Start with the "
            "right ZOMBI_DATA_DIR or ZOMBI_WAREHOUSE, or with an empty data directory",
            code="LAKE_AHEAD",
            retry_after_secs=30,
        )
        log.error("%s", error)
        self._blocked[table] = error
        self.open.discard(table)
