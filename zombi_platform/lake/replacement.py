"""Merged files take the place of small ones: a `replace` snapshot with the same events.

A merge is planned from one snapshot and committed only on top of that very snapshot. If the
table has moved meanwhile, what was merged is given up: the small files are still there, and
the next merge takes them. So nothing that others did to the table is undone, and files that
were merged in vain can be deleted as soon as another snapshot is current (`Lake.sweep`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyiceberg.manifest import DataFile, FileFormat, ManifestContent, ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from zombi_platform.errors import CorruptionError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.manifests import live_files
from zombi_platform.lake.new_snapshot import BeforeWrite, Change, NewSnapshot
from zombi_platform.lake.schema import TABLE_SCHEMA, our_spec
from zombi_platform.lake.small_files import (
    FILES_MAX,
    LiveFile,
    MergedFile,
    MergeLimits,
    SmallFiles,
    choose,
    merge_name,
)
from zombi_platform.lake.state import MERGED, LakeState, check_lineage

if TYPE_CHECKING:
    from zombi_platform.lake.lake import Lake

ENTRIES_MAX: Final = 20_000
"""Files that are looked at, those of the newest manifests: small ones are there."""
PARTITION: Final = re.compile(
    r"/data/event_date=[0-9-]{10}/event_hour=\d{2}/partition=(\d+)/[^/]+\.parquet$"
)
"""Files of ours. Others write elsewhere, and what is in their files is theirs."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What to merge, and the state of the table that it was found in."""

    table: str
    base: int
    """The snapshot on top of which the merge is committed, or not at all."""
    groups: tuple[SmallFiles, ...]
    loaded: Table = field(repr=False)
    data_files: Mapping[str, DataFile] = field(repr=False)
    holders: Mapping[str, ManifestFile] = field(repr=False)
    """The manifest that names each file."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The snapshot of a merge."""

    snapshot_id: int
    files_before: int
    files_after: int
    events: int
    bytes: int


def plan_merge(lake: Lake, table: str, limits: MergeLimits) -> MergePlan | None:
    """What is worth merging now; None if that is nothing."""
    # The state alone is cheap to read, and as a rule tells that there is nothing to do.
    glance = lake.state(table)
    found = lake.load(table) if glance is not None and _has_gained(glance, limits) else None
    if found is None:
        return None
    loaded, state = found
    check_lineage(state)
    current = loaded.metadata.current_snapshot()
    if current is None or not _is_ours(loaded):
        return None
    manifests = [manifest for manifest in current.manifests(loaded.io) if live_files(manifest)]
    if any(manifest.content == ManifestContent.DELETES for manifest in manifests):
        return None  # rows that somebody deleted would come back
    data_files: dict[str, DataFile] = {}
    holders: dict[str, ManifestFile] = {}
    for manifest in _newest(manifests, our_spec(loaded.metadata).spec_id):
        for entry in manifest.fetch_manifest_entry(loaded.io):
            data_files[entry.data_file.file_path] = entry.data_file
            holders[entry.data_file.file_path] = manifest
    home = f"{lake.storage.table_location(table)}/"
    groups = choose(_ours(data_files.values(), home), limits)
    if not groups:
        return None
    return MergePlan(table, current.snapshot_id, groups, loaded, data_files, holders)


def replace(
    lake: Lake, plan: MergePlan, merged: Sequence[MergedFile], before_write: BeforeWrite
) -> Replacement | None:
    """Put merged files in the place of those they hold; None if the table has moved."""
    # Here and not above: it loads pandas, which the gateway does without.
    from zombi_platform.lake.data_files import read_data_files

    if not merged:
        return None
    _check_events(merged)
    removed = [plan.data_files[file.path] for one in merged for file in one.replaced]
    added = read_data_files(lake.storage, plan.loaded.metadata, [one.file for one in merged])
    snapshot = NewSnapshot(lake, plan.table, plan.loaded)
    change = Change(
        operation=Operation.REPLACE,
        added=added,
        name=f"{merge_name(plan.base)}{uuid4()}",
        summary={MERGED: str(len(removed))},
        removed=removed,
        holders=list({plan.holders[file.file_path] for file in removed}),
    )
    if not snapshot.commit(change, before_write):
        return None
    failpoint("merge.committed")
    return Replacement(
        snapshot_id=snapshot.id,
        files_before=len(removed),
        files_after=len(merged),
        events=sum(one.file.events for one in merged),
        bytes=sum(one.file.bytes for one in merged),
    )


def _has_gained(state: LakeState, limits: MergeLimits) -> bool:
    """Whether small files can have come together since the last merge.

    As the snapshots' summaries say: so many flushes brought some, or one brought a great many.
    """
    flushes = files = 0
    for snapshot in state.lineage:
        if MERGED in snapshot.summary:
            break
        if snapshot.added_bytes < snapshot.added_files * limits.small_max:
            flushes, files = flushes + 1, files + snapshot.added_files
    else:
        # Of files from before the oldest snapshot that is kept nothing is known but their number.
        older = sum(one.total_files - one.added_files for one in state.lineage[-1:])
        flushes += older if flushes else 0
    return flushes >= limits.at or files >= FILES_MAX // 2


def _is_ours(table: Table) -> bool:
    """Whether a file with our columns holds all there is: others may have added some."""
    return table.metadata.schema().as_struct() == TABLE_SCHEMA.as_struct()


def _ours(files: Iterable[DataFile], home: str) -> Iterable[LiveFile]:
    for file in files:
        match = PARTITION.search(file.file_path)
        if match and file.file_path.startswith(home) and file.file_format == FileFormat.PARQUET:
            day, hour_of_day = file.partition[0], file.partition[1]
            yield LiveFile(
                path=file.file_path,
                partition=int(match[1]),
                hour=day * 24 + hour_of_day,
                events=file.record_count,
                bytes=file.file_size_in_bytes,
            )


def _newest(manifests: Iterable[ManifestFile], spec_id: int) -> Iterable[ManifestFile]:
    """The newest manifests with files of our spec, as many as are looked at."""
    entries = 0
    for manifest in sorted(manifests, key=lambda manifest: -manifest.sequence_number):
        entries += live_files(manifest)
        if entries > ENTRIES_MAX:
            return
        if manifest.partition_spec_id == spec_id:
            yield manifest


def _check_events(merged: Sequence[MergedFile]) -> None:
    """Raise unless each file holds what it was made of, and no two were made of the same."""
    for one in merged:
        events = sum(file.events for file in one.replaced)
        if one.file.events != events:
            raise CorruptionError(
                f"{one.file.path} holds {one.file.events} events; the {len(one.replaced)} files "
                f"it was made of hold {events}. They stay in the table"
            )
    replaced = [file.path for one in merged for file in one.replaced]
    if len(set(replaced)) != len(replaced):
        raise CorruptionError("a file was merged into two others. It stays in the table")
