"""A catalog that is nothing but the tables' own metadata files, on a disk or in a bucket.

`{warehouse}/{table}/metadata/v{N}.metadata.json`: the highest N is the table. A commit
creates the next number, which only one writer can; it is the atomic step and needs no
server. `version-hint.text` is written for engines that read the directory themselves and
never read here, because a listing costs one request and cannot be stale.

A writer that slept between loading and creating could create a number that was tidied away
long ago and believe that it had committed. So it looks again after the create: if higher
numbers exist and the next one is not built on its own, it takes its file back.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from pyiceberg.catalog import Catalog, PropertiesUpdateSummary
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, CreateTableTransaction, Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, new_table_metadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
from pyiceberg.table.update import TableRequirement, TableUpdate, update_table_metadata
from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties

from zombi_platform.errors import LakeRefusedError, LakeUnavailableError
from zombi_platform.events import TABLE_NAME
from zombi_platform.lake.file_io import StorageIO, io_properties
from zombi_platform.lake.schema import METADATA_KEPT
from zombi_platform.lake.storage import Storage, Stored

if TYPE_CHECKING:
    import pyarrow as pa

VERSION: Final = re.compile(r"/metadata/v([1-9][0-9]{0,17})\.metadata\.json$")
LISTINGS_MAX: Final = 3
"""Tries to find the current metadata file while somebody tidies up or drops the table."""
PRUNED_EVERY: Final = 20
"""Commits after which old metadata files are looked for, which takes the age of each."""
PRUNED_MAX: Final = 100
"""Old metadata files deleted at once at most."""


class _Settled(Snapshot):
    """A snapshot that is in the table already: nobody changes it, so it is its own copy.

    pyiceberg copies all metadata deeply for every commit, which would make commits slower
    with each snapshot that is kept.
    """

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self


class FilesystemTable(Table):
    """A table, and the very bytes of the metadata file that it was read from."""

    def __init__(self, content: bytes, *of_table: Any) -> None:
        super().__init__(*of_table)
        self.content = content


class FilesystemCatalog(Catalog):
    """One namespace, its tables directly below the warehouse."""

    def __init__(self, storage: Storage, namespace: str, grace_secs: float) -> None:
        super().__init__("zombi", warehouse=storage.warehouse, **io_properties(storage))
        self._storage = storage
        self._namespace = namespace
        self._grace_secs = grace_secs

    # Tables

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        table = self._table(identifier)
        home = self._storage.table_location(table)
        if location not in (None, home):
            raise ValueError(f"a filesystem catalog keeps table {table!r} at {home}")
        if not isinstance(schema, Schema):
            raise ValueError("the schema must be an Iceberg schema")
        if self._versions(table):
            raise TableAlreadyExistsError(f"table {table!r} exists already at {home}")
        metadata = new_table_metadata(schema, partition_spec, sort_order, home, dict(properties))
        location, content = self._file(table, 1), _encode(metadata)
        try:
            self._storage.create(location, content)
        except FileExistsError as error:
            raise TableAlreadyExistsError(f"table {table!r} exists already at {home}") from error
        self._look_again(table, 1, metadata)
        return self.bind(table, location, content)

    def load_table(self, identifier: str | Identifier) -> Table:
        table = self._table(identifier)
        return self.bind(table, *self.read_metadata(table))

    def read_metadata(self, table: str) -> tuple[str, bytes]:
        """Location and content of the current metadata file; `NoSuchTableError` without one."""
        # A file that was listed may be gone when read only if the table was dropped meanwhile.
        for _ in range(LISTINGS_MAX):
            location = self._head(table)
            try:
                return location, self._storage.read(location)
            except FileNotFoundError:
                continue
        raise self._no_table(table)

    def locate(self, table: str, known: Stored | None = None) -> Stored:
        """The current metadata file; `known`, an earlier answer, saves listing."""
        if known is not None:
            following = self._file(table, _version(known.location) + 1)
            still = self._storage.find(known.location)
            if still is not None and not self._storage.exists(following):
                return still
        for _ in range(LISTINGS_MAX):
            found = self._storage.find(self._head(table))
            if found is not None:
                return found
        raise self._no_table(table)

    def bind(self, table: str, location: str, content: bytes) -> Table:
        """The table that a metadata file describes."""
        metadata = TableMetadataUtil.parse_raw(content.decode())
        settled = [
            _Settled.model_construct(snapshot.model_fields_set, **snapshot.__dict__)
            for snapshot in metadata.snapshots
        ]
        metadata = metadata.model_copy(update={"snapshots": settled})
        io = StorageIO(self.properties)
        return FilesystemTable(content, (self._namespace, table), metadata, location, io, self)

    def next_file(self, table: Table) -> str:
        """Where the metadata of the next commit will be."""
        return self._file(self._table(table.name()), _version(table.metadata_location) + 1)

    def commit_table(
        self,
        table: Table,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> CommitTableResponse:
        name = self._table(table.name())
        current = table if self._is_unchanged(table) else self.load_table(table.name())
        for requirement in requirements:
            requirement.validate(current.metadata)
        metadata = update_table_metadata(
            current.metadata, updates, metadata_location=current.metadata_location
        )
        version = _version(current.metadata_location) + 1
        location = self._file(name, version)
        try:
            self._storage.create(location, _encode(metadata))
        except FileExistsError as error:
            raise CommitFailedException(
                f"somebody else committed version {version} of table {name!r}"
            ) from error
        self._look_again(name, version, metadata)
        return CommitTableResponse.model_validate(
            {"metadata": metadata, "metadata-location": location}
        )

    def drop_table(self, identifier: str | Identifier) -> None:
        """Forget the table; its data files stay. Oldest first, so that it never looks older."""
        table = self._table(identifier)
        versions = self._versions(table)
        if not versions:
            raise NoSuchTableError(f"there is no table {table!r}")
        self._storage.delete([f"{self._storage.table_location(table)}/metadata/version-hint.text"])
        for version in sorted(versions):
            self._storage.delete([self._file(table, version)])

    def table_exists(self, identifier: str | Identifier) -> bool:
        return bool(self._versions(self._table(identifier)))

    def list_tables(self, namespace: str | Identifier) -> list[Identifier]:
        self._check_namespace(namespace)
        names = self._storage.directories(self._storage.warehouse)
        return [
            (self._namespace, name)
            for name in names
            if TABLE_NAME.fullmatch(name) and self._versions(name)
        ]

    # Files

    def _look_again(self, table: str, version: int, metadata: TableMetadata) -> None:
        """Make sure that the version just created is in the table's history."""
        found = self._versions(table)
        if version not in found:
            head = max(found, default=0)
            raise CommitStateUnknownException(
                f"version {version} of table {table!r} is gone: the table is at {head}"
            )
        if max(found) > version and not self._is_built_on(table, version, metadata):
            self._storage.delete([self._file(table, version)])
            raise CommitFailedException(
                f"version {version} of table {table!r} is long past: it is at {max(found)}"
            )
        # The commit is done; that its traces are tidied up can wait for the next one.
        with suppress(LakeUnavailableError, LakeRefusedError):
            self._tidy(table, version)

    def _is_unchanged(self, table: Table) -> bool:
        """Whether the file a table was loaded from is there as it was. If somebody has made
        the next one, that shows when ours is created."""
        if not isinstance(table, FilesystemTable):
            return False
        try:
            return self._storage.read(table.metadata_location) == table.content
        except FileNotFoundError:
            return False

    def _is_built_on(self, table: str, version: int, metadata: TableMetadata) -> bool:
        """Whether somebody's next version came after ours, not after one of the same number."""
        try:
            content = self._storage.read(self._file(table, version + 1))
        except FileNotFoundError:
            return False
        following = TableMetadataUtil.parse_raw(content.decode())
        before = following.metadata_log[-1] if following.metadata_log else None
        head = metadata.current_snapshot_id
        return (
            following.table_uuid == metadata.table_uuid
            and before is not None
            and before.timestamp_ms == metadata.last_updated_ms
            and (head is None or following.snapshot_by_id(head) is not None)
        )

    def _tidy(self, table: str, version: int) -> None:
        """Leave a hint, and delete metadata that is neither named by the table nor young."""
        hint = f"{self._storage.table_location(table)}/metadata/version-hint.text"
        self._storage.write(hint, str(version).encode())
        if version % PRUNED_EVERY:
            return
        before_ms = (time.time() - self._grace_secs) * 1000
        found = {
            int(match[1]): stored
            for stored in self._storage.files(self._prefix(table))
            if (match := VERSION.search(stored.location))
        }
        oldest = [found[number] for number in sorted(found) if number < version - METADATA_KEPT]
        # In order and without gaps: whoever remembers a version looks for the next one.
        old = takewhile(lambda stored: stored.modified_ms < before_ms, oldest[:PRUNED_MAX])
        for stored in old:
            self._storage.delete([stored.location])

    def _head(self, table: str) -> str:
        versions = self._versions(table)
        if not versions:
            raise self._no_table(table)
        return self._file(table, max(versions))

    def _versions(self, table: str) -> set[int]:
        names = self._storage.names(self._prefix(table))
        return {int(match[1]) for name in names if (match := VERSION.search(f"/metadata/{name}"))}

    def _prefix(self, table: str) -> str:
        return f"{self._storage.table_location(table)}/metadata/v"

    def _file(self, table: str, version: int) -> str:
        return f"{self._storage.table_location(table)}/metadata/v{version}.metadata.json"

    def _no_table(self, table: str) -> NoSuchTableError:
        return NoSuchTableError(f"there is no table {table!r} in {self._storage.warehouse}")

    # Names

    def _table(self, identifier: str | Identifier) -> str:
        *namespace, table = self.identifier_to_tuple(identifier)
        if tuple(namespace) != (self._namespace,) or TABLE_NAME.fullmatch(table) is None:
            raise NoSuchTableError(f"there is no table {'.'.join((*namespace, table))!r}")
        return table

    def _check_namespace(self, namespace: str | Identifier) -> None:
        if self.identifier_to_tuple(namespace) != (self._namespace,):
            raise NoSuchNamespaceError(f"the only namespace is {self._namespace!r}")

    def namespace_exists(self, namespace: str | Identifier) -> bool:
        return self.identifier_to_tuple(namespace) == (self._namespace,)

    def list_namespaces(self, namespace: str | Identifier = ()) -> list[Identifier]:
        return [] if namespace else [(self._namespace,)]

    def load_namespace_properties(self, namespace: str | Identifier) -> Properties:
        self._check_namespace(namespace)
        return {"location": self._storage.warehouse}

    def create_namespace(
        self, namespace: str | Identifier, properties: Properties = EMPTY_DICT
    ) -> None:
        self._check_namespace(namespace)

    def list_views(self, namespace: str | Identifier) -> list[Identifier]:
        return []

    def view_exists(self, identifier: str | Identifier) -> bool:
        return False

    def supports_server_side_planning(self) -> bool:
        return False

    # What a directory of files cannot do

    def create_table_transaction(self, *_: Any, **__: Any) -> CreateTableTransaction:
        _cannot("create a table in a transaction")

    def register_table(self, *_: Any, **__: Any) -> Table:
        _cannot("register a table that lives elsewhere")

    def purge_table(self, *_: Any, **__: Any) -> None:
        _cannot("purge a table: its files have tombstones")

    def rename_table(self, *_: Any, **__: Any) -> Table:
        _cannot("rename a table: its name is its place")

    def drop_namespace(self, *_: Any, **__: Any) -> None:
        _cannot("drop its namespace")

    def update_namespace_properties(self, *_: Any, **__: Any) -> PropertiesUpdateSummary:
        _cannot("keep properties of its namespace")

    def load_view(self, *_: Any, **__: Any) -> NoReturn:
        _cannot("hold views")

    def register_view(self, *_: Any, **__: Any) -> NoReturn:
        _cannot("hold views")

    def drop_view(self, *_: Any, **__: Any) -> None:
        _cannot("hold views")

    def create_view(self, *_: Any, **__: Any) -> NoReturn:
        _cannot("hold views")


def _cannot(what: str) -> NoReturn:
    raise NotImplementedError(f"a filesystem catalog cannot {what}")


def _encode(metadata: TableMetadata) -> bytes:
    return metadata.model_dump_json(exclude_none=True).encode()


def _version(location: str) -> int:
    match = VERSION.search(location)
    if match is None:
        raise ValueError(f"{location} is not a metadata file of a filesystem catalog")
    return int(match[1])
