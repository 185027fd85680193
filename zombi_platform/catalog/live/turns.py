"""Work that many wait for: one run at a time, each begun after all who share it have asked.

Who asks while a run is under way shares the next one, never the current one: that may have
looked before the asker's own events were acked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def next(self) -> T:
        """The result of a run that begins after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(_look)
        # One who gives up must not take the result from the others.
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._work()


def _look(task: asyncio.Task[Any]) -> None:
    """Take note of a failure, for all who asked may have gone."""
    if not task.cancelled():
        task.exception()
