"""How far each table has come on its way to Iceberg, as the gateway tells it. Pure values.

They travel as JSON between the gateway and whoever works for it or watches.
"""

from __future__ import annotations

from dataclasses import dataclass

from zombi_platform.cuts import CutState


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one partition: last sequence given out, last one in Iceberg, last one deleted hot."""

    high: int
    flushed: int
    cleaned: int


@dataclass(frozen=True, slots=True)
class CutProgress:
    id: int
    state: CutState
    events: int
    bytes: int
    splits: int
    staged_splits: int
    files: int
    file_bytes: int
    age_secs: float


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    holder: str
    epoch: int
    expires_in_secs: float


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What stopped the last run of a table; gone with the next commit or cleaning."""

    error: str
    code: str
    step: str
    transient: bool
    at_ms: int
    run_id: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class RegistrationProgress:
    """The last commit of events that an external catalog has; `lag` if that is not our last."""

    snapshot_id: int | None
    lag: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LakeProgress:
    """The table in the catalog, as the gateway last saw it."""

    snapshot_id: int | None
    metadata_location: str | None


@dataclass(frozen=True, slots=True)
class TableProgress:
    table: str
    events: int
    bytes: int
    oldest_age_secs: float | None
    """Of the oldest event in the hot buffer."""
    unflushed_events: int
    unflushed_bytes: int
    """What is in no cut yet."""
    cuts: tuple[CutProgress, ...]
    cut_due: bool
    commit_due: bool
    clean_due: bool
    reasons: tuple[str, ...]
    requested: bool
    tombstones_due: int
    lease: LeaseProgress | None
    failure: FailureReport | None
    watermarks: dict[int, Marks]
    lag_secs: float
    """Age of the oldest event that is not in Iceberg."""
    registration: RegistrationProgress | None
    lake: LakeProgress | None


@dataclass(frozen=True, slots=True)
class Progress:
    tables: tuple[TableProgress, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Cuts that the gateway has found in the lake."""

    committed: tuple[int, ...]
    snapshot_id: int | None
    watermarks: dict[int, int]


@dataclass(frozen=True, slots=True)
class Cleaned:
    deleted_events: int
    remaining_events: int
    """Events of the table that stay in the hot buffer."""
    wait_secs: float
    """Until the next cut is past its retention; 0 when none waits."""


@dataclass(frozen=True, slots=True)
class Due:
    """Tombstones whose time has come; a prefix stands for every file under it."""

    paths: tuple[str, ...]
    prefixes: tuple[str, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    status: str
    """`flushed`, or `in_progress` when the time to wait was up."""
    table: str
    events_flushed: int
    segments_written: int
    snapshot_id: int | None
