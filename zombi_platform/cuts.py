"""What is on its way to Iceberg: cuts, their splits and the files made of them. Pure values.

A cut fixes, for one table, which sequences of each partition are flushed together. It is
made by the hot buffer, staged by an engine and committed by the lake; these values travel
between them as JSON. `TRANSITIONS` is the only list of what may follow what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class CutState(StrEnum):
    OPEN = "open"
    STAGED = "staged"
    COMMITTED = "committed"


TRANSITIONS: Final[Mapping[CutState, frozenset[CutState]]] = {
    CutState.OPEN: frozenset({CutState.STAGED}),
    CutState.STAGED: frozenset({CutState.COMMITTED}),
    CutState.COMMITTED: frozenset(),
}
"""A cleaned cut has no state: cleaning deletes the record together with the events."""


@dataclass(frozen=True, slots=True)
class Range:
    """The sequences `first` to `last` of a partition, both included."""

    partition: int
    first: int
    last: int

    @property
    def events(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Split:
    """What one task stages: ranges that together are about one target file."""

    number: int
    ranges: tuple[Range, ...]
    bytes: int

    @property
    def events(self) -> int:
        return sum(part.events for part in self.ranges)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A Parquet file of one hour and partition, whole and durable, in no snapshot yet."""

    path: str
    split: int
    partition: int
    hour: int
    """Hours since 1970-01-01T00:00Z of every event in the file."""
    events: int
    bytes: int
    first: int
    last: int
    """Lowest and highest sequence in the file; others between them may be of another hour."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One flush of one table, as the hot buffer recorded it."""

    table: str
    id: int
    """Rises by one with each cut of the table and is never reused."""
    state: CutState
    created_ms: int
    oldest_ms: int
    """When the oldest event of the cut arrived."""
    ranges: tuple[Range, ...]
    splits: tuple[Split, ...]
    files: tuple[StagedFile, ...] = ()
    staged_splits: tuple[int, ...] = ()
    snapshot_id: int | None = None
    committed_ms: int | None = None
    mark: str = ""
    """Random: tells the cut from one of the same number and ranges of another gateway."""

    @property
    def events(self) -> int:
        return sum(part.events for part in self.ranges)

    @property
    def bytes(self) -> int:
        return sum(split.bytes for split in self.splits)

    @property
    def starts(self) -> dict[int, int]:
        """The watermark each partition must have in the lake for this cut to be next."""
        return {part.partition: part.first - 1 for part in self.ranges}

    @property
    def ends(self) -> dict[int, int]:
        """The watermark each partition has in the lake once this cut is committed."""
        return {part.partition: part.last for part in self.ranges}

    @property
    def missing(self) -> tuple[Split, ...]:
        """The splits no worker has reported yet."""
        done = set(self.staged_splits)
        return tuple(split for split in self.splits if split.number not in done)
