"""One try to put a new snapshot on a table, from one loaded state of it.

The caller says what the snapshot adds and takes out. Here its manifests are written, each
with a tombstone first, old snapshots expire with it, and everything becomes true in one
commit that requires the loaded snapshot still to be current. An unknown outcome is looked
up under the snapshot's own id, never repeated. The catalog's own `commit_table` is called
directly, because pyiceberg's transactions retry without looking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

from zombi_platform.errors import ZombiError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake.manifests import ManifestPlan, plan_manifests, write_manifests
from zombi_platform.lake.orphans import choose_expired, orphaned_by_expiry
from zombi_platform.lake.schema import our_spec

if TYPE_CHECKING:
    from zombi_platform.lake.lake import Lake


class BeforeWrite(Protocol):
    """Called before files are written or orphaned, so that each has a tombstone by then."""

    def __call__(self, paths: Sequence[str], prefixes: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Change:
    """What a snapshot adds to the table and takes out of it."""

    operation: Operation
    added: Sequence[DataFile]
    name: str
    """How the names of its manifests begin; no other attempt has it."""
    summary: Mapping[str, str]
    properties: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[DataFile] = ()
    holders: Sequence[ManifestFile] = ()
    """The manifests that name what is removed."""


class NewSnapshot:
    def __init__(self, lake: Lake, table: str, loaded: Table) -> None:
        self._lake = lake
        self._table = table
        self._loaded = loaded
        self._metadata = loaded.metadata
        self.id = self._metadata.new_snapshot_id()
        self._expired = choose_expired(self._metadata, lake.snapshots_kept)

    def commit(self, change: Change, before_write: BeforeWrite) -> bool:
        """Write the manifests and commit; false means that somebody else was first."""
        removed = {file.file_path for file in change.removed}
        plan = plan_manifests(self._loaded, self.id, change.name, change.holders)
        orphans = orphaned_by_expiry(self._metadata, self._loaded.io, self._expired)
        announced = time.monotonic()
        before_write(
            [*plan.paths, *sorted(orphans), *self._lake.dropped_metadata(self._loaded)],
            self._lake.metadata_prefixes(self._loaded),
        )
        write_manifests(plan, self._loaded, change.added, removed)
        failpoint("commit.manifests-written")
        if not self._still_written(plan, time.monotonic() - announced):
            return False
        failpoint("commit.checked")
        try:
            updates = self._updates(change, plan)
            self._lake.commit_table(self._loaded, self._requirements(), updates)
        except (CommitFailedException, NoSuchTableError):
            return False
        except ZombiError:
            # It may have arrived. If it did, the snapshot is there under its own id.
            state = self._lake.state(self._table)
            if state is None or self.id not in state.snapshot_ids:
                raise
        return True

    def _still_written(self, plan: ManifestPlan, waited_secs: float) -> bool:
        """Whether the manifests are there: a worker that slept may find them swept."""
        if waited_secs < self._lake.grace_secs / 2:
            return True
        return all(self._lake.storage.exists(path) for path in plan.paths)

    def _requirements(self) -> tuple[TableRequirement, ...]:
        return (
            AssertTableUUID(uuid=self._metadata.table_uuid),
            AssertRefSnapshotId.model_validate(
                {"ref": MAIN_BRANCH, "snapshot-id": self._metadata.current_snapshot_id}
            ),
        )

    def _updates(self, change: Change, plan: ManifestPlan) -> tuple[TableUpdate, ...]:
        updates: list[TableUpdate] = [
            AddSnapshotUpdate(snapshot=self._snapshot(change, plan)),
            SetSnapshotRefUpdate.model_validate(
                {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": self.id}
            ),
        ]
        if change.properties:
            updates.append(SetPropertiesUpdate(updates=dict(change.properties)))
        if self._expired:
            ids = [snapshot.snapshot_id for snapshot in self._expired]
            updates.append(RemoveSnapshotsUpdate.model_validate({"snapshot-ids": ids}))
        return tuple(updates)

    def _snapshot(self, change: Change, plan: ManifestPlan) -> Snapshot:
        metadata = self._metadata
        return Snapshot.model_validate(
            {
                "snapshot-id": self.id,
                "parent-snapshot-id": metadata.current_snapshot_id,
                "sequence-number": metadata.next_sequence_number(),
                # Iceberg's readers refuse a history that runs backwards, as clocks may.
                "timestamp-ms": max(int(time.time() * 1000), metadata.last_updated_ms + 1),
                "manifest-list": plan.list_path,
                "summary": self._summary(change),
                "schema-id": metadata.current_schema_id,
            }
        )

    def _summary(self, change: Change) -> Summary:
        metadata = self._metadata
        schema, spec = metadata.schema(), our_spec(metadata)
        collector = SnapshotSummaryCollector()
        for file in change.added:
            collector.add_file(file, schema, spec)
        for file in change.removed:
            collector.remove_file(file, schema, spec)
        previous = metadata.current_snapshot()
        summary = update_snapshot_summaries(
            # pyiceberg adds a replacement up like an overwrite, but refuses to be asked for one.
            Summary(Operation.OVERWRITE, **collector.build(), **change.summary),
            previous.summary if previous is not None else None,
        )
        return Summary(change.operation, **summary.additional_properties)
