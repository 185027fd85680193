"""Which files nothing refers to: those an expiry leaves behind, and those safe to delete.

Expiring is metadata only. What it orphans gets tombstones first; deletion comes much later
and looks at every snapshot that is still kept, so a wrong guess here costs space, not data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

from pyiceberg.expressions import And, BooleanExpression, EqualTo, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from zombi_platform.lake.storage import Storage

EXPIRED_MAX: Final = 20
"""Snapshots that one commit expires at most, so that lowering the setting costs no pause."""
READERS: Final = 16

HOUR: Final = re.compile(r"/event_date=(\d{4}-\d{2}-\d{2})/event_hour=(\d{2})/")

T = TypeVar("T")
U = TypeVar("U")


def choose_expired(metadata: TableMetadata, kept: int) -> list[Snapshot]:
    """The oldest snapshots beyond `kept`, counting the one about to be added.

    A tenth of them at a time: to find what an expiry orphans, two manifest lists are read for
    one snapshot, eleven for ten.
    """
    excess = len(metadata.snapshots) + 1 - kept
    if excess < min(max(1, kept // 10), EXPIRED_MAX):
        return []
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    oldest = sorted(metadata.snapshots, key=lambda snapshot: snapshot.sequence_number or 0)
    free = [snapshot for snapshot in oldest if snapshot.snapshot_id not in named]
    return free[: min(excess, EXPIRED_MAX)]


def orphaned_by_expiry(
    metadata: TableMetadata, io: FileIO, expired: Sequence[Snapshot]
) -> set[str]:
    """Files that only these snapshots refer to, as far as each one's successor tells."""
    if not expired:
        return set()
    following = {
        snapshot.parent_snapshot_id: snapshot
        for snapshot in metadata.snapshots
        if snapshot.parent_snapshot_id is not None
    }

    @cache
    def manifests(snapshot_id: int) -> dict[str, ManifestFile]:
        snapshot = metadata.snapshot_by_id(snapshot_id)
        assert snapshot is not None
        return {manifest.manifest_path: manifest for manifest in snapshot.manifests(io)}

    orphans = set()
    for snapshot in expired:
        orphans.add(snapshot.manifest_list)
        child = following.get(snapshot.snapshot_id)
        successor = child or metadata.current_snapshot()
        if successor is None or successor.snapshot_id == snapshot.snapshot_id:
            continue
        before, after = manifests(snapshot.snapshot_id), manifests(successor.snapshot_id)
        orphans |= before.keys() - after.keys()
        if child is None or _deletes(child):
            orphans |= _replaced(io, before, after)
    return orphans


def _deletes(snapshot: Snapshot) -> bool:
    summary = snapshot.summary
    return summary is not None and int(summary.get("deleted-data-files") or 0) > 0


def _replaced(
    io: FileIO, before: Mapping[str, ManifestFile], after: Mapping[str, ManifestFile]
) -> set[str]:
    """Data files that were live in one snapshot and are not in the next."""
    gone = [before[path] for path in before.keys() - after.keys()]
    new = [after[path] for path in after.keys() - before.keys()]
    return _data_files(io, gone) - _data_files(io, new)


def unreferenced(storage: Storage, table: Table, candidates: Iterable[str]) -> set[str]:
    """The candidates that no kept snapshot and no metadata refers to."""
    metadata, io = table.metadata, table.io
    # Other writers spell the same place `file:/…` or `s3a://…`: compare paths, not URIs.
    left = {storage.path(location): location for location in candidates}

    def drop(referenced: Iterable[str]) -> None:
        for location in referenced:
            left.pop(storage.path(location), None)

    drop(_metadata_files(metadata, table.metadata_location))
    if left:
        lists = _parallel(lambda snapshot: snapshot.manifests(io), metadata.snapshots)
        manifests = {manifest.manifest_path: manifest for found in lists for manifest in found}
        drop(manifests)
        inside = storage.path(f"{metadata.location}/metadata/")
        data = [path for path in left if not path.startswith(inside)]
        drop(_data_files(io, _relevant(metadata, manifests.values(), data)))
    return set(left.values())


def _metadata_files(metadata: TableMetadata, metadata_location: str) -> set[str]:
    statistics = [*metadata.statistics, *metadata.partition_statistics]
    return {
        metadata_location,
        f"{metadata.location}/metadata/version-hint.text",
        *(entry.metadata_file for entry in metadata.metadata_log),
        *(snapshot.manifest_list for snapshot in metadata.snapshots),
        *(file.statistics_path for file in statistics),
    }


def _relevant(
    metadata: TableMetadata, manifests: Iterable[ManifestFile], paths: Iterable[str]
) -> list[ManifestFile]:
    """The manifests that may name one of these files, judged by the hours in their paths."""
    hours = {match.groups() if (match := HOUR.search(path)) else None for path in paths}
    if not hours:
        return []
    if None in hours:
        return list(manifests)
    schema, specs = metadata.schema(), metadata.specs()

    @cache
    def evaluators(spec_id: int) -> list[Callable[[ManifestFile], bool]]:
        return [
            manifest_evaluator(
                specs[spec_id],
                schema,
                And(_equal("event_date", date), _equal("event_hour", int(hour))),
            )
            for date, hour in filter(None, hours)
        ]

    return [
        manifest
        for manifest in manifests
        if any(matches(manifest) for matches in evaluators(manifest.partition_spec_id))
    ]


def _equal(column: str, value: str | int) -> BooleanExpression:
    return EqualTo(term=Reference(column), value=literal(value))


def _data_files(io: FileIO, manifests: Iterable[ManifestFile]) -> set[str]:
    """Paths of the live files in these manifests."""
    found = _parallel(lambda manifest: manifest.fetch_manifest_entry(io), list(manifests))
    return {entry.data_file.file_path for entries in found for entry in entries}


def _parallel(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(work, items))
