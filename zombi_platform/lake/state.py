"""What the lake says about a table, read from its metadata without pyiceberg.

The gateway asks for it before it believes that anything was committed, so it is cheap: one
decoding of the metadata file. The watermarks are table properties, written in the same
commit as the files they stand for; the lineage says whether that commit still counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from zombi_platform.cuts import Cut, CutState
from zombi_platform.errors import CorruptionError, LakeConflictError

WATERMARK: Final = "zombi.watermark."
HIGH_WATERMARK: Final = "zombi.high_watermark."
MARK: Final = "zombi.mark."
CUTS: Final = "zombi.cuts"
EVENTS: Final = "zombi.events"
LAST_SNAPSHOT: Final = "zombi.snapshot"
MERGED: Final = "zombi.merged"
"""In the summary of a merge: how many files it replaced."""


@dataclass(frozen=True, slots=True)
class LakeSnapshot:
    """A snapshot of the current lineage. Its summary is read when somebody asks, for of the
    hundred that a table keeps one or two are asked."""

    id: int
    parent_id: int | None
    timestamp_ms: int
    summary: Mapping[str, str] = field(repr=False)

    @property
    def operation(self) -> str:
        return self.summary.get("operation", "")

    @property
    def cuts(self) -> Mapping[int, int]:
        """The cuts it carries, and the events of each."""
        with self._reading():
            return {int(cut): int(events) for cut, events, *_ in self._cuts()}

    @property
    def marks(self) -> Mapping[int, str]:
        """The marks of those cuts."""
        with self._reading():
            return {int(cut): rest[0] for cut, _, *rest in self._cuts() if rest}

    @property
    def watermarks(self) -> Mapping[int, int]:
        with self._reading():
            return watermarks_of(self.summary)

    @property
    def added_records(self) -> int:
        with self._reading():
            return int(self.summary.get("added-records", "0"))

    @property
    def added_files(self) -> int:
        with self._reading():
            return int(self.summary.get("added-data-files", "0"))

    @property
    def total_files(self) -> int:
        with self._reading():
            return int(self.summary.get("total-data-files", "0"))

    @property
    def added_bytes(self) -> int:
        with self._reading():
            return int(self.summary.get("added-files-size", "0"))

    def _cuts(self) -> list[list[str]]:
        return [item.split(":") for item in self.summary.get(CUTS, "").split()]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CorruptionError(f"the summary of snapshot {self.id}: {error}") from error


@dataclass(frozen=True, slots=True)
class LakeState:
    """A table as the catalog shows it now."""

    table: str
    uuid: str
    location: str
    metadata_location: str
    snapshot_id: int | None
    watermarks: Mapping[int, int]
    marks: Mapping[int, str]
    """Of each partition: the mark of the cut that moved its watermark last."""
    lineage: tuple[LakeSnapshot, ...]
    """The current snapshot, its parent, and so on as far as they are kept."""
    last_zombi_snapshot: int | None
    """The snapshot of the last commit made here, whether or not it still counts."""
    snapshot_ids: frozenset[int] = field(repr=False)
    """Every snapshot kept, of this lineage or not."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Cuts that the lake holds, with the snapshot that carries each, if it is still kept."""

    snapshots: Mapping[int, int | None]
    watermarks: Mapping[int, int]


class _Snapshot(msgspec.Struct, rename="kebab"):
    snapshot_id: int
    timestamp_ms: int
    manifest_list: str = ""
    parent_snapshot_id: int | None = None
    summary: dict[str, str] = msgspec.field(default_factory=dict)


class _Metadata(msgspec.Struct, rename="kebab"):
    table_uuid: str
    location: str
    current_snapshot_id: int | None = None
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    snapshots: list[_Snapshot] = msgspec.field(default_factory=list)


_decoder = msgspec.json.Decoder(_Metadata)


def read_state(table: str, metadata_location: str, content: bytes | str) -> LakeState:
    """The state that a metadata file describes."""
    try:
        metadata = _decoder.decode(content)
        by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        return LakeState(
            table=table,
            uuid=metadata.table_uuid,
            location=metadata.location,
            metadata_location=metadata_location,
            # -1 is how older writers say "none".
            snapshot_id=metadata.current_snapshot_id
            if metadata.current_snapshot_id in by_id
            else None,
            watermarks=watermarks_of(metadata.properties),
            marks=marks_of(metadata.properties),
            lineage=tuple(_lineage(metadata.current_snapshot_id, by_id)),
            last_zombi_snapshot=last_snapshot_of(metadata.properties),
            snapshot_ids=frozenset(by_id),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptionError(f"{metadata_location} is not table metadata: {error}") from error


def watermarks_of(properties: Mapping[str, str]) -> dict[int, int]:
    """The watermark of each partition that has one."""
    return {
        int(name.removeprefix(WATERMARK)): int(value)
        for name, value in properties.items()
        if name.startswith(WATERMARK)
    }


def marks_of(properties: Mapping[str, str]) -> dict[int, str]:
    return {
        int(name.removeprefix(MARK)): value
        for name, value in properties.items()
        if name.startswith(MARK)
    }


def last_snapshot_of(properties: Mapping[str, str]) -> int | None:
    return int(properties[LAST_SNAPSHOT]) if LAST_SNAPSHOT in properties else None


def write_cuts(cuts: Sequence[Cut]) -> str:
    """Cuts, their events and marks as a snapshot's summary has them: `7:1000:9f3c 8:25:07aa`."""
    return " ".join(f"{cut.id}:{cut.events}:{cut.mark}" for cut in cuts)


def _lineage(current: int | None, by_id: Mapping[int, _Snapshot]) -> list[LakeSnapshot]:
    found: list[LakeSnapshot] = []
    while current is not None and current in by_id and len(found) < len(by_id):
        snapshot = by_id[current]
        parent = snapshot.parent_snapshot_id
        found.append(LakeSnapshot(current, parent, snapshot.timestamp_ms, snapshot.summary))
        current = parent
    return found


def check_lineage(state: LakeState) -> None:
    """Raise if the last commit made here was taken out of the table's history."""
    last = state.last_zombi_snapshot
    if last is None or any(snapshot.id == last for snapshot in state.lineage):
        return
    # It is the newest of ours: whoever finds an older one without it looks past it.
    skipped = any(snapshot.cuts for snapshot in state.lineage)
    if last in state.snapshot_ids or state.snapshot_id is None or skipped:
        remedy = (
            f"Set snapshot {last}, or one that follows it, as current again (in Spark: "
            f"CALL system.set_current_snapshot('{state.table}', {last}))"
            if last in state.snapshot_ids
            else "It has expired since: register an older metadata file that still has it"
        )
        raise LakeConflictError(
            f"table {state.table!r} was rolled back: snapshot {last} is no longer in the history "
            f"of the current snapshot {state.snapshot_id}, so events that were committed are not "
            f"visible. {remedy}; nothing is committed or deleted until then",
            code="TABLE_ROLLED_BACK",
        )
    # Somebody expired it, which does not take events out of the table.


def verify(state: LakeState | None, cuts: Sequence[Cut]) -> Verified:
    """Check that the lake holds these cuts, each exactly once; raise what is wrong otherwise."""
    if not cuts:
        return Verified({}, state.watermarks if state is not None else {})
    if state is None:
        raise LakeConflictError(
            f"table {cuts[0].table!r} is not in the catalog any more, so cut {cuts[0].id} is not "
            "committed; put the table back before events are deleted",
            code="TABLE_DROPPED",
        )
    check_lineage(state)
    return Verified({cut.id: _find(state, cut) for cut in cuts}, state.watermarks)


def _find(state: LakeState, cut: Cut) -> int | None:
    behind = {p: state.watermarks.get(p, 0) for p, end in cut.ends.items()}
    for partition, end in cut.ends.items():
        if behind[partition] < end:
            raise LakeConflictError(
                f"cut {cut.id} of table {state.table!r} is not committed: partition {partition} "
                f"ends at {behind[partition]} in the lake and at {end} in the cut",
                code="NOT_IN_LAKE",
            )
    for snapshot in state.lineage:
        if cut.id in snapshot.cuts and _carries(snapshot, cut):
            _check_records(state, snapshot, cut)
            return snapshot.id
    if cut.state is CutState.COMMITTED:
        # It was found before and has expired since, which takes no event away; `check_lineage`
        # saw that the commits made here are all in the history.
        return None
    for partition, end in cut.ends.items():
        if state.watermarks[partition] != end or state.marks.get(partition) != cut.mark:
            raise _foreign(state, cut, partition)
    return None


def check_marks(state: LakeState, cuts: Sequence[Cut]) -> None:
    """Raise if another gateway's events stand where the last of these cuts would."""
    last = {partition: cut for cut in cuts for partition in cut.ends}
    for partition, cut in last.items():
        here = state.watermarks.get(partition, 0) == cut.ends[partition]
        if here and state.marks.get(partition, cut.mark) != cut.mark:
            raise _foreign(state, cut, partition)


def _foreign(state: LakeState, cut: Cut, partition: int) -> LakeConflictError:
    return LakeConflictError(
        f"table {state.table!r} stands at {state.watermarks[partition]} in partition {partition}, "
        f"cut {cut.id} ends at {cut.ends[partition]}, but other events were committed there. "
        "Another gateway writes the same partition of the same table: give each its own "
        "partitions or its own table",
        code="FENCE_MISMATCH",
    )


def _carries(snapshot: LakeSnapshot, cut: Cut) -> bool:
    """Whether it is this cut, not one of the same number from another gateway."""
    if snapshot.marks.get(cut.id, cut.mark) != cut.mark:
        return False
    return not snapshot.watermarks or all(
        snapshot.watermarks.get(partition, 0) >= end for partition, end in cut.ends.items()
    )


def _check_records(state: LakeState, snapshot: LakeSnapshot, cut: Cut) -> None:
    events = sum(snapshot.cuts.values())
    if snapshot.added_records != events or snapshot.cuts[cut.id] != cut.events:
        raise LakeConflictError(
            f"snapshot {snapshot.id} of table {state.table!r} added {snapshot.added_records} "
            f"records for cuts of {events} events; cut {cut.id} has {cut.events} and is recorded "
            f"with {snapshot.cuts[cut.id]}",
            code="COUNTS_DIFFER",
        )
