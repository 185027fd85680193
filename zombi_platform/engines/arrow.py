"""The engine in this process: splits staged and files merged in threads, without Java.

Arrow lets go of the interpreter lock while it compresses and writes, so threads use more
than one core. A failure stops what has not begun; what is under way ends first, because
what it records need not be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import TypeVar

from zombi_platform.cuts import Split
from zombi_platform.engines.contract import MergingJob, SplitResult, StagingJob
from zombi_platform.engines.merging import merge_files
from zombi_platform.engines.staging import stage_split
from zombi_platform.errors import CorruptionError
from zombi_platform.lake.small_files import MergedFile, SmallFiles

T = TypeVar("T")
U = TypeVar("U")


class ArrowEngine:
    name = "arrow"

    def __init__(self, concurrency: int = 1) -> None:
        self._concurrency = concurrency

    def ready(self) -> None:
        """It always is."""

    def stage(
        self, job: StagingJob, splits: Sequence[Split], on_split: Callable[[SplitResult], None]
    ) -> None:
        self._run(partial(stage_split, job), splits, on_split)

    def merge(
        self,
        job: MergingJob,
        groups: Sequence[SmallFiles],
        on_merged: Callable[[MergedFile], None],
    ) -> None:
        spoiled: list[CorruptionError] = []

        def merge(group: SmallFiles) -> MergedFile | None:
            try:
                return merge_files(job, group)
            except CorruptionError as error:
                spoiled.append(error)
                return None

        self._run(merge, groups, on_merged)
        if spoiled:
            raise spoiled[0]

    def close(self) -> None:
        """Threads end with each call."""

    def _run(
        self, work: Callable[[T], U | None], items: Sequence[T], on_result: Callable[[U], None]
    ) -> None:
        """An item whose work comes to None is not told of."""
        waiting = iter(items)
        running: set[Future[U | None]] = set()
        failure: BaseException | None = None
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="engine") as pool:
            while True:
                if failure is None:
                    room = self._concurrency - len(running)
                    running |= {pool.submit(work, one) for one in islice(waiting, room)}
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    failure = failure or error
                    if error is None and (result := future.result()) is not None:
                        on_result(result)
        if failure is not None:
            raise failure
