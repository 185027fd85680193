"""The lake as the gateway asks it: in threads of its own, remembering what it last said.

Requests that must not wait read `seen`; those that need the truth call `state`. Whether the
lake answers at all is kept for the health routes, so that no probe waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from zombi_platform.cuts import Cut
from zombi_platform.errors import ConflictError, LakeConflictError, ZombiError
from zombi_platform.events import TABLE_NAME
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.state import LakeState, Verified, verify

CALLS_MAX: Final = 4
"""Calls to the catalog at once; more wait their turn."""
CHECK_SECS: Final = 30.0
"""How often an idle gateway looks whether the lake answers."""

FRESH_SECS: Final = 1.0
LOOK_SECS: Final = 3.0
"""Those who only look wait so long for the lake and ask no more often."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LakeHealth:
    status: Literal["ok", "error", "unknown"]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    snapshot_id: int | None
    metadata_location: str
    watermarks: dict[int, int]
    at: float


class LakeView:
    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="lake")
        self._answered = time.monotonic()
        self.health = LakeHealth("unknown")
        self.seen: dict[str, Seen] = {}
        """Each table as the catalog last showed it."""

    async def tables(self) -> list[str]:
        """Names in the catalog that can be tables of ours."""
        names = await self._call(self._lake.tables)
        return [name for name in names if TABLE_NAME.fullmatch(name)]

    async def state(self, table: str) -> LakeState | None:
        """What the catalog says about a table now."""
        state = await self._call(self._lake.state, table)
        if state is None:
            self.seen.pop(table, None)
        else:
            self.seen[table] = Seen(
                snapshot_id=state.snapshot_id,
                metadata_location=state.metadata_location,
                watermarks=dict(state.watermarks),
                at=time.monotonic(),
            )
        return state

    async def look(self, table: str) -> str | None:
        """Bring `seen` up to date unless it is fresh; returns what kept it from that."""
        seen = self.seen.get(table)
        if seen is not None and time.monotonic() - seen.at < FRESH_SECS:
            return None
        try:
            async with asyncio.timeout(LOOK_SECS):
                await self.state(table)
        except TimeoutError:
            return f"the lake has not answered within {LOOK_SECS:g} s"
        except ZombiError as error:
            return str(error)
        return None

    async def verify(self, table: str, cuts: Sequence[Cut]) -> Verified:
        """Raise ConflictError unless the lake holds these cuts, each exactly once."""
        state = await self.state(table)
        try:
            return verify(state, cuts)
        except LakeConflictError as error:
            raise ConflictError(str(error), code=error.code) from error

    async def watch(self) -> None:
        """Keep `health` true when nobody else asks the lake; never returns."""
        while True:
            await asyncio.sleep(CHECK_SECS)
            if time.monotonic() - self._answered >= CHECK_SECS:
                try:
                    await self.tables()
                except ZombiError:
                    continue  # `health` has it

    async def _call(self, work: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._threads, work, *args)
        except ZombiError as error:
            self.health = LakeHealth("error", str(error))
            raise
        finally:
            self._answered = time.monotonic()
        self.health = LakeHealth("ok")
        return answer

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
