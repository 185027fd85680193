"""The `lake` warehouse: committed tables as Iceberg REST clients load and commit to them.

A load passes the table's current metadata file through; a file is read once, since it never
changes. A commit is checked and made by the catalog that the platform itself commits to, so
that Spark's procedures and our own commits race under one rule.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, TypeVar

from zombi_platform.catalog.commits import commit
from zombi_platform.catalog.metadata import only_referenced, plain
from zombi_platform.errors import NotFoundError
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.storage import Storage, Stored

CACHE_BYTES_MAX: Final = 64 * 2**20
CALLS_MAX: Final = 8
"""Calls to the catalog and its files at once; more wait their turn."""

T = TypeVar("T")

Snapshots = Literal["all", "refs"]


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table's metadata and where it is stored. Equal etags mean equal content, which equal
    locations do not: a table that was dropped and made again begins with the same names."""

    location: str
    content: bytes
    etag: str


class LakeWarehouse:
    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._files = _Cache(CACHE_BYTES_MAX)
        self._current: dict[str, Stored] = {}
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="catalog")
        self.config = client_config(lake.storage)

    async def tables(self) -> list[str]:
        return await self._in_thread(self._lake.tables)

    async def exists(self, table: str) -> bool:
        return await self._in_thread(self._locate, table) is not None

    async def load(self, table: str, snapshots: Snapshots = "all") -> LoadedTable:
        """The table as it is now; `NotFoundError` if the catalog has none of this name."""
        return await self._in_thread(self._load, table, snapshots)

    async def commit(self, table: str, body: bytes) -> tuple[str, bytes]:
        """Apply a client's commit, as `commits.commit` does; location and content after it."""
        return await self._in_thread(self._commit, table, body)

    def close(self) -> None:
        self._threads.shutdown()

    def _load(self, table: str, snapshots: Snapshots) -> LoadedTable:
        file = self._locate(table)
        if file is None:
            raise no_table(table)
        key = _key(file) if snapshots == "all" else f"{_key(file)} refs"
        content = self._files.get(key)
        if content is None:
            content = self._read(file)
            if snapshots == "refs":
                content = only_referenced(content)
                self._files.put(key, content)
        return LoadedTable(file.location, content, _etag(key))

    def _commit(self, table: str, body: bytes) -> tuple[str, bytes]:
        location = commit(self._lake, table, body)
        return location, plain(self._lake.storage.read(location))

    def _read(self, file: Stored) -> bytes:
        key = _key(file)
        content = self._files.get(key)
        if content is None:
            content = plain(self._lake.storage.read(file.location))
            self._files.put(key, content)
        return content

    def _locate(self, table: str) -> Stored | None:
        file = self._lake.locate(table, self._current.get(table))
        if file is None:
            self._current.pop(table, None)
        else:
            self._current[table] = file
        return file

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


class _Cache:
    """Files by location, the least lately used forgotten first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def put(self, key: str, content: bytes) -> None:
        with self._lock:
            before = self._files.pop(key, b"")
            self._files[key] = content
            self._bytes_left += len(before) - len(content)
            while self._bytes_left < 0:
                _, dropped = self._files.popitem(last=False)
                self._bytes_left += len(dropped)


def no_table(table: str) -> NotFoundError:
    return NotFoundError(f"there is no table {table[:200]!r} here", code="TABLE_NOT_FOUND")


def client_config(storage: Storage) -> dict[str, str]:
    """What a client needs to find the files, besides credentials of its own."""
    if not storage.is_s3:
        return {}
    config = {"s3.region": storage.region, "client.region": storage.region}
    if storage.endpoint is not None:
        config |= {"s3.endpoint": storage.endpoint, "s3.path-style-access": "true"}
    return config


def _key(file: Stored) -> str:
    return f"{file.location} {file.bytes} {file.modified_ms}"


def _etag(key: str) -> str:
    return f'"{hashlib.sha256(key.encode()).hexdigest()[:32]}"'
