"""Files of the live view that no answer names any more, until no query can still read them.

What this process let go of is deleted when its time has come. What others or an earlier
process left behind is found by listing: no snapshot refers to a block past its age, so a
file that is older by the longest query belongs to nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from zombi_platform.catalog.live.blocks import BLOCK_AGE_SECS_MAX
from zombi_platform.errors import ZombiError
from zombi_platform.lake.storage import Storage

UPKEEP_SECS: Final = 5.0
LISTING_SECS: Final = 3600.0

log = logging.getLogger("zombi.live")


class Graves:
    def __init__(
        self, storage: Storage, grace_secs: float, directories: Callable[[], Sequence[str]]
    ) -> None:
        self._storage = storage
        self._grace_secs = grace_secs
        self._directories = directories
        self._due: deque[tuple[float, str]] = deque()
        self._listed_at: float | None = None
        self._upkeep = asyncio.create_task(self._keep_up())

    def add(self, locations: Sequence[str]) -> None:
        """Delete these files once the longest query is over."""
        due = time.monotonic() + self._grace_secs
        self._due.extend((due, location) for location in locations)

    async def close(self) -> None:
        self._upkeep.cancel()
        await asyncio.gather(self._upkeep, return_exceptions=True)

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_SECS)
            try:
                await self._delete_due()
                await self._delete_left_behind()
            except ZombiError as error:
                log.warning("files of the live view are not deleted yet: %s", error)

    async def _delete_due(self) -> None:
        now = time.monotonic()
        doomed = [location for due, location in self._due if due <= now]
        if doomed:
            await asyncio.to_thread(self._storage.delete, doomed)
            for _ in doomed:
                self._due.popleft()

    async def _delete_left_behind(self) -> None:
        now = time.monotonic()
        if self._listed_at is not None and now - self._listed_at < LISTING_SECS:
            return
        self._listed_at = now
        for directory in self._directories():
            await asyncio.to_thread(self._sweep, directory)

    def _sweep(self, directory: str) -> None:
        before_ms = (time.time() - BLOCK_AGE_SECS_MAX - self._grace_secs) * 1000
        old = [
            found.location
            for found in self._storage.files(directory + "/")
            if found.modified_ms < before_ms
        ]
        self._storage.delete(old)
