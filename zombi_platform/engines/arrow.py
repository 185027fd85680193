"""The engine in this process: splits staged in threads, without Spark or Java.

Arrow lets go of the interpreter lock while it compresses and writes, so threads use more
than one core. A failing split stops those that have not begun; those under way end first,
because what they record need not be staged again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from zombi_platform.cuts import Split
from zombi_platform.engines.contract import SplitResult, StagingJob
from zombi_platform.engines.staging import stage_split


class ArrowEngine:
    name = "arrow"

    def __init__(self, concurrency: int = 1) -> None:
        self._concurrency = concurrency

    def ready(self) -> None:
        """It always is."""

    def stage(
        self, job: StagingJob, splits: Sequence[Split], on_split: Callable[[SplitResult], None]
    ) -> None:
        waiting = iter(splits)
        running: set[Future[SplitResult]] = set()
        failure: BaseException | None = None
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="stage") as pool:
            while True:
                if failure is None:
                    room = self._concurrency - len(running)
                    running |= {pool.submit(stage_split, job, one) for one in islice(waiting, room)}
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    failure = failure or error
                    if error is None:
                        on_split(future.result())
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Threads end with each call of `stage`."""
