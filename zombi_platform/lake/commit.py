"""The fenced commit: staged cuts become one snapshot, exactly once, whoever else tries.

The fence is the watermark of each partition, kept as table properties: a commit is made
only from the state it was planned for, in one step that requires the loaded snapshot still
to be current, and it moves the watermarks in the same step (`new_snapshot.py`). A conflict
starts over from loading, and so meets the fence again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from zombi_platform.cuts import Cut, CutState
from zombi_platform.errors import InvalidRequestError, LakeConflictError, LakeUnavailableError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.new_snapshot import BeforeWrite, Change, NewSnapshot
from zombi_platform.lake.state import (
    CUTS,
    EVENTS,
    HIGH_WATERMARK,
    LAST_SNAPSHOT,
    MARK,
    WATERMARK,
    LakeState,
    check_lineage,
    check_marks,
    write_cuts,
)

if TYPE_CHECKING:
    from zombi_platform.lake.lake import Lake

ATTEMPTS: Final = 20
"""Conflicts with other committers after which the worker gives up for now."""
BACKOFF_SECS_MAX: Final = 2.0
SUMMARY_PARTITIONS_MAX: Final = 64
"""Partitions past which a snapshot's summary leaves the watermarks out; a hundred summaries
of thousands of partitions would be megabytes in every metadata file. The properties, which
are what counts, always have them all."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What the lake holds after a commit; `events` and `files` are what this call added."""

    snapshot_id: int | None
    watermarks: Mapping[int, int]
    cuts: tuple[int, ...]
    events: int
    files: int
    bytes: int


def commit(lake: Lake, table: str, cuts: Sequence[Cut], before_write: BeforeWrite) -> Commit:
    """Put the cuts into the table, or find that they are there."""
    # Here and not above: it loads pandas, which the gateway, who only asks, does without.
    from zombi_platform.lake.data_files import read_data_files

    _check_cuts(table, cuts)
    described: dict[str, DataFile] = {}
    for attempt in range(ATTEMPTS):
        loaded, state = _load(lake, table, cuts)
        failpoint("commit.loaded")
        check_lineage(state)
        left = remaining(state, cuts)
        if not left:
            return _result(state.last_zombi_snapshot, state.watermarks, cuts, ())
        files = [file for cut in left for file in cut.files]
        missing = [file for file in files if file.path not in described]
        for found in read_data_files(lake.storage, loaded.metadata, missing) if missing else ():
            described[found.file_path] = found
        snapshot = NewSnapshot(lake, table, loaded)
        change = _change(snapshot.id, left, [described[file.path] for file in files])
        if snapshot.commit(change, before_write):
            failpoint("commit.done")
            watermarks = {**state.watermarks, **_ends(left)}
            return _result(snapshot.id, watermarks, cuts, left)
        time.sleep(random.uniform(0, min(0.05 * 2**attempt, BACKOFF_SECS_MAX)))
    raise LakeUnavailableError(
        f"table {table!r} changed under each of {ATTEMPTS} tries to commit: "
        "somebody else commits to it all the time",
        code="COMMIT_CONTENDED",
    )


def remaining(state: LakeState, cuts: Sequence[Cut]) -> Sequence[Cut]:
    """The cuts that are not in the table yet: all, none, or those after a whole number of them."""
    marks = _starts(cuts)
    found = {partition: state.watermarks.get(partition, 0) for partition in marks}
    if not state.watermarks and _follows_others(cuts):
        raise _mismatch(state, cuts, found)
    for done in range(len(cuts) + 1):
        if found == marks:
            check_marks(state, cuts[:done])
            return cuts[done:]
        if done < len(cuts):
            marks |= cuts[done].ends
    raise _mismatch(state, cuts, found)


def _change(snapshot_id: int, cuts: Sequence[Cut], files: Sequence[DataFile]) -> Change:
    ends = _ends(cuts)
    watermarks = {f"{WATERMARK}{partition}": str(end) for partition, end in ends.items()}
    summary = {CUTS: write_cuts(cuts), EVENTS: str(sum(cut.events for cut in cuts))}
    if len(ends) <= SUMMARY_PARTITIONS_MAX:
        summary |= watermarks
        summary |= {f"{HIGH_WATERMARK}{partition}": str(end) for partition, end in ends.items()}
    return Change(
        operation=Operation.APPEND,
        added=files,
        name=str(uuid4()),
        summary=summary,
        properties={
            **watermarks,
            **{f"{MARK}{partition}": cut.mark for cut in cuts for partition in cut.ends},
            LAST_SNAPSHOT: str(snapshot_id),
        },
    )


def _load(lake: Lake, table: str, cuts: Sequence[Cut]) -> tuple[Table, LakeState]:
    """The table; made if it is new, refused if it once was there."""
    found = lake.load(table)
    if found is not None:
        return found
    if _follows_others(cuts):
        raise LakeConflictError(
            f"table {table!r} is gone from the catalog, though events up to cut {cuts[0].id} were "
            "committed to it. Put it back, for example by registering its last metadata file; "
            "events that are not committed stay in the hot buffer",
            code="TABLE_DROPPED",
        )
    lake.ensure_table(table)
    found = lake.load(table)
    if found is None:
        raise LakeUnavailableError(f"table {table!r} vanished after it was made")
    return found


def _check_cuts(table: str, cuts: Sequence[Cut]) -> None:
    if not cuts:
        raise InvalidRequestError("there is no cut to commit")
    marks = _starts(cuts)
    for before, cut in zip((None, *cuts), cuts, strict=False):
        if cut.table != table or cut.state is not CutState.STAGED:
            raise InvalidRequestError(
                f"cut {cut.id} is a {cut.state} one of table {cut.table!r}; only staged cuts of "
                f"{table!r} can be committed"
            )
        if before is not None and cut.id <= before.id:
            raise InvalidRequestError(f"cut {cut.id} cannot follow cut {before.id}")
        for partition, start in cut.starts.items():
            if marks[partition] != start:
                raise InvalidRequestError(
                    f"cut {cut.id} begins after {start} in partition {partition}, "
                    f"where the cuts before it end at {marks[partition]}"
                )
        staged = sum(file.events for file in cut.files)
        if staged != cut.events:
            raise InvalidRequestError(
                f"cut {cut.id} has {cut.events} events, its files have {staged}"
            )
        marks |= cut.ends


def _follows_others(cuts: Sequence[Cut]) -> bool:
    """Whether the table must have commits already, be it of other partitions."""
    return cuts[0].id > 1 or any(_starts(cuts).values())


def _starts(cuts: Sequence[Cut]) -> dict[int, int]:
    """Where each partition must stand before the first of these cuts that touches it."""
    starts: dict[int, int] = {}
    for cut in reversed(cuts):
        starts |= cut.starts
    return starts


def _ends(cuts: Sequence[Cut]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for cut in cuts:
        ends |= cut.ends
    return ends


def _mismatch(state: LakeState, cuts: Sequence[Cut], found: Mapping[int, int]) -> LakeConflictError:
    starts, ends = _starts(cuts), _ends(cuts)
    if not state.watermarks and _follows_others(cuts):
        return LakeConflictError(
            f"table {state.table!r} has no watermarks, though events before cut {cuts[0].id} were "
            "committed: it seems to have been dropped and made again. Put the old table back; "
            "events that are not committed stay in the hot buffer",
            code="TABLE_DROPPED",
        )
    wrong = [p for p in starts if found[p] not in (starts[p], ends[p])] or list(starts)
    partition = wrong[0]
    return LakeConflictError(
        f"table {state.table!r} stands at {found[partition]} in partition {partition}; cuts "
        f"{cuts[0].id} to {cuts[-1].id} go from {starts[partition]} to {ends[partition]}. Another "
        "gateway with other data seems to write the same partition of the same table: give each "
        "its own partitions or its own table",
        code="FENCE_MISMATCH",
    )


def _result(
    snapshot_id: int | None,
    watermarks: Mapping[int, int],
    cuts: Sequence[Cut],
    added: Sequence[Cut],
) -> Commit:
    files = [file for cut in added for file in cut.files]
    return Commit(
        snapshot_id=snapshot_id,
        watermarks=watermarks,
        cuts=tuple(cut.id for cut in cuts),
        events=sum(cut.events for cut in added),
        files=len(files),
        bytes=sum(file.bytes for file in files),
    )
