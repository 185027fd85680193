"""What is kept in memory of cuts, enough to tell what is due without reading any.

Rebuilt from the records whenever the database is opened. Times are by a clock that never
jumps; a stored time is taken over with its age, which is never negative.
"""

from __future__ import annotations

import time

import msgspec

from zombi_platform.cuts import Cut, CutState
from zombi_platform.hot.cut_records import read_files
from zombi_platform.hot.partitions import Partition
from zombi_platform.hot.scan import blocks_between
from zombi_platform.hot.splits import bytes_up_to
from zombi_platform.hot.store import Store


class Held(msgspec.Struct):
    """What is known in memory of a cut that is not cleaned yet."""

    id: int
    state: CutState
    since: float
    """When its oldest event came; this and `committed` by the clock that never jumps."""
    events: int
    bytes: int
    splits: int
    staged: set[int]
    files: int = 0
    file_bytes: int = 0
    snapshot_id: int | None = None
    committed: float | None = None


class TableCuts(msgspec.Struct):
    last_id: int = 0
    held: dict[int, Held] = {}
    """By id, oldest first."""
    open: Cut | None = None
    since: float | None = None
    """When the oldest event came that is in no cut, by the clock that never jumps."""
    snapshot_id: int | None = None
    """Of the last commit."""
    files_committed: int = 0


def held_of(cut: Cut) -> Held:
    return Held(
        id=cut.id,
        state=cut.state,
        since=steady(cut.oldest_ms),
        events=cut.events,
        bytes=cut.bytes,
        splits=len(cut.splits),
        staged=set(),
        snapshot_id=cut.snapshot_id,
        committed=None if cut.committed_ms is None else steady(cut.committed_ms),
    )


def remember(state: TableCuts, store: Store, cut: Cut) -> None:
    held = held_of(cut)
    for split, files in read_files(store, cut.table, cut.id):
        held.staged.add(split)
        held.files += len(files)
        held.file_bytes += sum(file.bytes for file in files)
    state.held[cut.id] = held
    state.snapshot_id = cut.snapshot_id or state.snapshot_id
    if cut.state is CutState.OPEN:
        state.open = cut


def uncut(store: Store, member: Partition) -> tuple[int, int | None]:
    """Bytes up to where the last cut ended, and arrival of the first event after it."""
    if member.cut >= member.last:
        return member.bytes_end, None
    for block in blocks_between(store, member, member.cut + 1, member.cut + 1):
        if member.cut < block.first:
            return block.bytes_before, block.ingest_ms
        return bytes_up_to(store, member, member.cut), block.ingest_ms
    return member.bytes_end, None


def steady(at_ms: int) -> float:
    """A stored time by the clock that never jumps; the other may have been turned back."""
    return time.monotonic() - max(time.time() - at_ms / 1000, 0.0)
