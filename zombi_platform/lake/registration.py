"""Shows our tables in an external REST catalog (`ZOMBI_CATALOG_URL`) and keeps them up to date.

The first time a table is registered with our metadata file; later its snapshots, head and
properties are brought up to ours in one commit that requires the external head still to be
what was loaded. The external catalog only follows: nothing is decided by what it says. A
failure changes nothing here and the next call starts from what both sides then have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemovePropertiesUpdate,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)

from zombi_platform.errors import LakeConflictError, LakeUnavailableError, SettingsError
from zombi_platform.lake.catalogs import catalog_errors, ensure_namespace, open_rest_catalog
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.state import last_snapshot_of
from zombi_platform.settings import Settings


@dataclass(frozen=True, slots=True)
class Registration:
    """What the external catalog shows: its snapshot, and how many of ours came after it."""

    snapshot_id: int | None
    lag: int
    commit_id: int | None = None
    """The last of its snapshots that brought events; merges may have come after it."""


class ExternalCatalog:
    def __init__(self, settings: Settings, lake: Lake) -> None:
        if settings.catalog_url is None:
            raise SettingsError("ZOMBI_CATALOG_URL names no external catalog")
        self._settings = settings
        self._url = settings.catalog_url
        self._lake = lake

    @cached_property
    def catalog(self) -> Catalog:
        """The open catalog; opened on first use, because opening needs the network."""
        return open_rest_catalog(
            self._url,
            self._settings,
            self._lake.storage,
            {"warehouse": self._settings.catalog_warehouse},
        )

    def look(self, table: str) -> Registration:
        """How far behind the external catalog is; changes nothing."""
        ours = self._ours(table).metadata
        with catalog_errors(self._url):
            theirs = self._load(table)
        return _compare(ours, theirs.metadata if theirs else None)

    def bring_up_to_date(self, table: str) -> Registration:
        """Register the table or make the external one like ours."""
        ours = self._ours(table)
        with catalog_errors(self._url):
            theirs = self._load(table) or self._register(table, ours)
            self._check_same(table, ours.metadata, theirs.metadata)
            updates = _updates(ours.metadata, theirs.metadata)
            if updates:
                self._commit(table, theirs, updates)
                theirs = self._load(table) or theirs
        return _compare(ours.metadata, theirs.metadata)

    def _ours(self, table: str) -> Table:
        found = self._lake.load(table)
        if found is None:
            raise LakeConflictError(
                f"there is no table {table!r} to register", code="TABLE_DROPPED"
            )
        return found[0]

    def _load(self, table: str) -> Table | None:
        try:
            return self.catalog.load_table((self._lake.namespace, table))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def _register(self, table: str, ours: Table) -> Table:
        identifier = (self._lake.namespace, table)
        ensure_namespace(self.catalog, self._lake.namespace)
        try:
            return self.catalog.register_table(identifier, ours.metadata_location)
        except TableAlreadyExistsError:
            return self.catalog.load_table(identifier)

    def _commit(self, table: str, theirs: Table, updates: tuple[TableUpdate, ...]) -> None:
        head = AssertRefSnapshotId.model_validate(
            {"ref": MAIN_BRANCH, "snapshot-id": theirs.metadata.current_snapshot_id}
        )
        same = AssertTableUUID(uuid=theirs.metadata.table_uuid)
        try:
            self.catalog.commit_table(theirs, (same, head), updates)
        except CommitFailedException as error:
            raise LakeUnavailableError(
                f"somebody else changed table {table!r} in {self._url} meanwhile: {error}",
                code="REGISTRATION_CONTENDED",
            ) from error

    def _check_same(self, table: str, ours: TableMetadata, theirs: TableMetadata) -> None:
        if ours.table_uuid != theirs.table_uuid:
            raise LakeConflictError(
                f"{self._url} has another table {table!r} ({theirs.table_uuid}, ours is "
                f"{ours.table_uuid}): drop it there without purging, or choose another "
                "ZOMBI_CATALOG_NAMESPACE",
                code="REGISTERED_OTHER",
            )


def _updates(ours: TableMetadata, theirs: TableMetadata) -> tuple[TableUpdate, ...]:
    """What makes their metadata show what ours shows; nothing if it does."""
    updates: list[TableUpdate] = []
    known = {snapshot.snapshot_id for snapshot in theirs.snapshots}
    # Some catalogs keep only the head, so what is older than it is not missing.
    updates += [AddSnapshotUpdate(snapshot=snapshot) for snapshot in _newer(ours, theirs)]
    head = ours.current_snapshot_id
    if head is not None and head != theirs.current_snapshot_id:
        updates.append(
            SetSnapshotRefUpdate.model_validate(
                {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": head}
            )
        )
    kept = {snapshot.snapshot_id for snapshot in ours.snapshots}
    if expired := known - kept:
        updates.append(RemoveSnapshotsUpdate.model_validate({"snapshot-ids": sorted(expired)}))
    return (*updates, *_property_updates(ours, theirs))


def _property_updates(ours: TableMetadata, theirs: TableMetadata) -> list[TableUpdate]:
    changed = {
        name: value
        for name, value in ours.properties.items()
        if theirs.properties.get(name) != value
    }
    # Only our own names: a catalog may keep properties of its own on a table.
    gone = [
        name
        for name in theirs.properties
        if name.startswith("zombi.") and name not in ours.properties
    ]
    updates: list[TableUpdate] = []
    if changed:
        updates.append(SetPropertiesUpdate(updates=changed))
    if gone:
        updates.append(RemovePropertiesUpdate(removals=gone))
    return updates


def _compare(ours: TableMetadata, theirs: TableMetadata | None) -> Registration:
    if theirs is None:
        return Registration(None, len(ours.snapshots))
    if theirs.current_snapshot_id == ours.current_snapshot_id:
        lag = 0
    else:
        lag = max(1, len(_newer(ours, theirs)))
    commit_id = last_snapshot_of(theirs.properties)
    return Registration(theirs.current_snapshot_id, lag, commit_id)


def _newer(ours: TableMetadata, theirs: TableMetadata) -> list[Snapshot]:
    """Our snapshots that were made after their last one, oldest first."""
    newer = [
        snapshot
        for snapshot in ours.snapshots
        if (snapshot.sequence_number or 0) >= theirs.next_sequence_number()
    ]
    return sorted(newer, key=lambda snapshot: snapshot.sequence_number or 0)
