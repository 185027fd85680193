"""Which tables to flush now. Pure: what the gateway says, what runs, what failed before.

A table whose last run failed waits, longer with each failure in a row. One that failed for
good waits until somebody asks for a flush: a retry cannot help it, and other tables go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from zombi_platform.progress import TableProgress

BACKOFF_FIRST_SECS: Final = 10
BACKOFF_MAX_SECS: Final = 600
ASKED_AGAIN_SECS: Final = 30
"""A request may retry what failed for good, but not faster than this."""

OBSERVED_EVERY_SECS: Final = 60
TOMBSTONES_DUE_MIN: Final = 100
"""Fewer wait for the next flush of the table or the daily run."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures in a row of a table, and when the last one was told."""

    count: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Observed:
    at_ms: int
    events: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What the sensor keeps from one tick to the next."""

    failures: dict[str, Failures] = field(default_factory=dict)
    observed: dict[str, Observed] = field(default_factory=dict)

    @staticmethod
    def read(cursor: str | None) -> Memory:
        return msgspec.json.decode(cursor, type=Memory) if cursor else Memory()

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


def recall(memory: Memory, tables: Sequence[TableProgress]) -> dict[str, Failures]:
    """Failures in a row as of now; a table that has none any more is forgotten."""
    found = {}
    for progress in tables:
        if progress.failure is None:
            continue
        known = memory.failures.get(progress.table, Failures(0, 0))
        new = progress.failure.at_ms != known.at_ms
        found[progress.table] = Failures(known.count + 1, progress.failure.at_ms) if new else known
    return found


def choose(
    tables: Sequence[TableProgress],
    failures: dict[str, Failures],
    busy: Collection[str],
    now_ms: int,
) -> list[TableProgress]:
    """The tables that a run should be started for."""
    return [
        progress
        for progress in tables
        if is_due(progress)
        and progress.table not in busy
        and progress.lease is None
        and _may_try(progress, failures.get(progress.table), now_ms)
    ]


def is_due(progress: TableProgress) -> bool:
    return (
        progress.cut_due
        or progress.commit_due
        or progress.clean_due
        or progress.tombstones_due >= TOMBSTONES_DUE_MIN
    )


def only_cleaning(progress: TableProgress) -> bool:
    return not progress.cut_due and not progress.commit_due


def _may_try(progress: TableProgress, failures: Failures | None, now_ms: int) -> bool:
    if failures is None or progress.failure is None:
        return True
    waited_secs = (now_ms - failures.at_ms) / 1000
    if not progress.failure.transient:
        return progress.requested and waited_secs >= ASKED_AGAIN_SECS
    doublings = min(failures.count - 1, 10)
    return waited_secs >= min(BACKOFF_FIRST_SECS * 2.0**doublings, BACKOFF_MAX_SECS)


def observe(memory: Memory, tables: Sequence[TableProgress], now_ms: int) -> list[TableProgress]:
    """The tables whose depth is to be shown: those that changed, each once in a while."""
    return [
        progress
        for progress in tables
        if (seen := memory.observed.get(progress.table)) is None
        or (
            now_ms - seen.at_ms >= OBSERVED_EVERY_SECS * 1000
            and (seen.events != progress.events or progress.unflushed_events)
        )
    ]
