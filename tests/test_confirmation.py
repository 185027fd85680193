"""Sequences of known tables are confirmed by the lake while writes wait for it, or do not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.lake.staging import stage
from tests.lake.worlds import put
from tests.test_hot_buffer import opened, rows, segment
from zombi_platform.cuts import Range
from zombi_platform.errors import ZombiError
from zombi_platform.gateway.confirmation import KNOWN_WAIT_SECS, Confirmation
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.hot import Append, HotBuffer
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


@asynccontextmanager
async def confirming(settings: Settings, hot: HotBuffer) -> AsyncIterator[Confirmation]:
    view = LakeView(Lake(settings))
    confirmation = Confirmation(hot, Pipeline(settings, hot, view), view)
    try:
        yield confirmation
    finally:
        await confirmation.close()
        view.close()


async def write(confirmation: Confirmation, payload: bytes) -> int:
    """The offset of an event that waits for its table to take writes."""
    acked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def done(append: Append, error: ZombiError | None) -> None:
        if error is None:
            acked.set_result(append.segments[0].first)
        else:
            acked.set_exception(error)

    confirmation.hold(Append("t", [segment([payload])], done))
    return await acked


def test_no_write_is_taken_while_sequences_are_being_moved(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = Lake(settings)

    async def learn() -> None:
        async with opened(settings) as hot, confirming(settings, hot) as confirmation:
            while "t" not in confirmation.open:
                await asyncio.sleep(0.01)

    async def go_on() -> tuple[int, list[int]]:
        async with opened(settings) as hot:
            disk = threading.Event()
            async with hot.changing() as change:
                busy = asyncio.ensure_future(change.run(lambda _: disk.wait()))
            async with confirming(settings, hot) as confirmation:
                # Past the time after which known tables go on without the lake.
                asyncio.get_running_loop().call_later(KNOWN_WAIT_SECS * 1.5, disk.set)
                offset = await write(confirmation, b"x")
                await busy
                async with hot.changing():
                    pass  # what was being moved is moved
            return offset, rows(hot, "t")["sequence"].to_pylist()

    put(lake, stage(lake.storage, "t", 1, Range(0, 1, 10)))
    asyncio.run(learn())
    put(lake, stage(lake.storage, "t", 1, Range(0, 11, 20)))
    assert asyncio.run(go_on()) == (21, [21])
