"""The lake as the gateway and the pipeline see it: ask, commit, verify, sweep.

A `Lake` holds settings and an open catalog, no state of its own: every answer comes from
the catalog. Its methods raise only `ZombiError`s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.table.update import TableRequirement, TableUpdate

from zombi_platform.cuts import Cut
from zombi_platform.errors import LakeConflictError, ZombiError
from zombi_platform.failpoints import failpoint
from zombi_platform.lake import commit as committing
from zombi_platform.lake import replacement
from zombi_platform.lake.catalogs import catalog_errors, ensure_namespace, open_catalog
from zombi_platform.lake.commit import Commit
from zombi_platform.lake.filesystem_catalog import FilesystemCatalog
from zombi_platform.lake.new_snapshot import BeforeWrite
from zombi_platform.lake.orphans import unreferenced
from zombi_platform.lake.replacement import MergePlan, Replacement
from zombi_platform.lake.schema import (
    METADATA_KEPT,
    PARTITION_SPEC,
    PROPERTIES,
    SORT_ORDER,
    TABLE_SCHEMA,
)
from zombi_platform.lake.small_files import MergedFile, MergeLimits, base_of
from zombi_platform.lake.state import LakeState, Verified, read_state, verify
from zombi_platform.lake.storage import Storage, Stored
from zombi_platform.settings import Settings


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: files deleted, and files in use or not the table's, which stay.

    The tombstones of both can go: a commit that orphans a file puts another first. Those of
    `waiting` cannot: a worker that slept may yet commit them.
    """

    deleted: tuple[str, ...]
    kept: tuple[str, ...]
    waiting: tuple[str, ...] = ()


class Lake:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.storage = Storage.from_settings(settings)
        self.namespace = settings.catalog_namespace
        self.snapshots_kept = settings.snapshots_kept
        self.grace_secs = settings.delete_grace_secs
        self._of_thread = threading.local()

    @property
    def catalog(self) -> Catalog:
        """The open catalog; opened on first use, because opening may need the network.

        pyiceberg's client of a Hive metastore is a single connection on which threads would
        read each other's answers, so there each has its own.
        """
        return self._hive if self._settings.catalog == "hive" else self._shared

    @cached_property
    def _shared(self) -> Catalog:
        return open_catalog(self._settings, self.storage)

    @property
    def _hive(self) -> Catalog:
        if not hasattr(self._of_thread, "catalog"):
            self._of_thread.catalog = open_catalog(self._settings, self.storage)
        opened: Catalog = self._of_thread.catalog
        return opened

    def tables(self) -> list[str]:
        """Names of the tables in the catalog."""
        with self._errors():
            try:
                return sorted(name for _, name in self.catalog.list_tables(self.namespace))
            except NoSuchNamespaceError:
                return []

    def state(self, table: str) -> LakeState | None:
        """What the catalog says about a table now; none if it has no such table."""
        with self._errors():
            try:
                if isinstance(self.catalog, FilesystemCatalog):
                    return read_state(table, *self.catalog.read_metadata(table))
                return _state(table, self.catalog.load_table((self.namespace, table)))
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def locate(self, table: str, known: Stored | None = None) -> Stored | None:
        """The current metadata file; `known`, an earlier answer, may save work."""
        with self._errors():
            try:
                if isinstance(self.catalog, FilesystemCatalog):
                    return self.catalog.locate(table, known)
                # Other catalogs never use a name twice.
                found = self.catalog.load_table((self.namespace, table))
                return Stored(found.metadata_location, 0, 0)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def require_state(self, table: str) -> LakeState:
        """The state of a table that must be there."""
        state = self.state(table)
        if state is None:
            raise LakeConflictError(f"table {table!r} is gone", code="TABLE_DROPPED")
        return state

    def load(self, table: str) -> tuple[Table, LakeState] | None:
        """The table for pyiceberg and its state, both of the same moment."""
        with self._errors():
            try:
                if not isinstance(self.catalog, FilesystemCatalog):
                    loaded = self.catalog.load_table((self.namespace, table))
                    return loaded, _state(table, loaded)
                location, content = self.catalog.read_metadata(table)
                return self.catalog.bind(table, location, content), read_state(
                    table, location, content
                )
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def ensure_table(self, table: str) -> LakeState:
        """Make the table unless it is there. Of two who make it at once, both get the same."""
        state = self.state(table)
        if state is not None:
            return state
        try:
            with self._errors():
                ensure_namespace(self.catalog, self.namespace)
                self.catalog.create_table(
                    (self.namespace, table),
                    TABLE_SCHEMA,
                    self.storage.table_location(table),
                    PARTITION_SPEC,
                    SORT_ORDER,
                    dict(PROPERTIES),
                )
        except (TableAlreadyExistsError, CommitFailedException):
            pass  # somebody was quicker
        except ZombiError:
            # The answer may be what was lost.
            if self.state(table) is None:
                raise
        failpoint("create.done")
        return self.require_state(table)

    def commit(self, table: str, cuts: Sequence[Cut], *, before_write: BeforeWrite) -> Commit:
        """Put consecutive staged cuts into the table as one snapshot, or find them there.

        Raises `LakeConflictError` (TABLE_DROPPED, TABLE_ROLLED_BACK, FENCE_MISMATCH) when the
        table is not as this platform left it; then a person must decide.
        """
        with self._errors():
            return committing.commit(self, table, cuts, before_write)

    def plan_merge(self, table: str) -> MergePlan | None:
        """Small files that are worth merging; None if there are none, or it is turned off."""
        limits = MergeLimits.of(self._settings)
        if limits is None:
            return None
        with self._errors():
            return replacement.plan_merge(self, table, limits)

    def replace(
        self, plan: MergePlan, merged: Sequence[MergedFile], *, before_write: BeforeWrite
    ) -> Replacement | None:
        """Put merged files in the place of small ones; None if the table has moved meanwhile."""
        with self._errors():
            return replacement.replace(self, plan, merged, before_write)

    def verify(self, table: str, cuts: Sequence[Cut]) -> Verified:
        """Check in the catalog that these cuts are committed; raise what is wrong otherwise."""
        return verify(self.state(table), cuts)

    def sweep(self, table: str, paths: Iterable[str], prefixes: Iterable[str] = ()) -> Swept:
        """Delete the files with these tombstones, except what the table refers to.

        What is not below the table's own directory stays, whoever put the tombstone: other
        tables are there, and only theirs can tell what they need.
        """
        named, prefixes = set(paths), list(prefixes)
        if not (named or prefixes):
            return Swept((), ())
        found = self.load(table)
        if found is None:
            raise LakeConflictError(
                f"table {table!r} is not in the catalog, which is no proof that its "
                f"{len(named) + len(prefixes)} tombstones name nothing needed: put it back",
                code="TABLE_DROPPED",
            )
        table_now, state = found
        homes = (state.location, self.storage.table_location(table))
        candidates = self._own(named, homes)
        for prefix in self._own(prefixes, homes):
            candidates.update(file.location for file in self.storage.files(prefix))
        with self._errors():
            unused = unreferenced(self.storage, table_now, candidates)
        waiting = {path for path in unused if _may_be_committed(path, state)}
        doomed = unused - waiting
        self.storage.delete(sorted(doomed))
        failpoint("sweep.deleted")
        kept = (named | candidates) - unused
        return Swept(tuple(sorted(doomed)), tuple(sorted(kept)), tuple(sorted(waiting)))

    def strays(self, table: str) -> list[str]:
        """Data and metadata that the table does not refer to; tombstones or cuts may."""
        found = self.load(table)
        if found is None:
            return []
        home = found[1].location
        everything = [
            file.location
            for directory in ("data", "metadata")
            for file in self.storage.files(f"{home}/{directory}/")
        ]
        with self._errors():
            return sorted(unreferenced(self.storage, found[0], everything))

    def check(self) -> list[str]:
        """What would keep events from reaching the lake, in words; empty if all is well."""
        problems = []
        exclusive = self._settings.catalog == "filesystem"
        for probe in (partial(self.storage.check, exclusive=exclusive), self.tables):
            try:
                probe()
            except ZombiError as error:
                problems.append(str(error))
        return problems

    # For the commit

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> None:
        with self._errors():
            try:
                self.catalog.commit_table(table, requirements, updates)
            except ValueError as error:
                # So pyiceberg refuses what does not fit on top of what is there by now; kinds
                # of it tell of an answer that could not be read, which is another matter.
                if type(error) is not ValueError:
                    raise
                raise CommitFailedException(str(error)) from error

    def metadata_prefixes(self, table: Table) -> list[str]:
        """How the names begin of metadata files that the next commit may leave unused."""
        directory = f"{table.metadata.location}/metadata"
        if isinstance(self.catalog, FilesystemCatalog):
            # Temporary files only: those with a number are tidied up by number, in order.
            return [f"{self.catalog.next_file(table)}."]
        if self._settings.catalog_url is not None:
            return []  # its metadata lies beside ours under names like these, and is in use
        number = table.metadata_location.rsplit("/", 1)[-1].partition("-")[0]
        return [f"{directory}/{int(number) + 1:05d}-"] if number.isdigit() else []

    def dropped_metadata(self, table: Table) -> list[str]:
        """Old metadata files that the next commit no longer names."""
        if isinstance(self.catalog, FilesystemCatalog):
            return []  # it tidies them up by number
        log = table.metadata.metadata_log
        return [entry.metadata_file for entry in log[: max(0, len(log) - METADATA_KEPT + 1)]]

    def _own(self, locations: Iterable[str], homes: Iterable[str]) -> set[str]:
        """Those below one of the directories."""
        below = self.storage.is_below
        return {found for found in locations if any(below(found, home) for home in homes)}

    def _errors(self) -> AbstractContextManager[None]:
        return catalog_errors(self._settings.catalog_uri or self._settings.catalog)


def _may_be_committed(path: str, state: LakeState) -> bool:
    """Whether a file that nothing refers to may yet come to be needed.

    A merge is committed on top of its own base only, so once another snapshot is current,
    nobody can commit what it left behind. And a table in which nothing was ever committed may
    be one that was made again in the place of another, which somebody will want back.
    """
    if state.last_zombi_snapshot is None:
        return True
    base = base_of(path)
    return base is not None and base == state.snapshot_id


def _state(table: str, loaded: Table) -> LakeState:
    return read_state(table, loaded.metadata_location, loaded.metadata.model_dump_json())
