"""The lake on a local disk.

A file is created by an exclusive link of a temporary one, so it is there whole or not at
all, and both the file and its directory are on disk before a method returns. Temporary
names are the final one with a suffix, so that a tombstone for a prefix covers them.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from zombi_platform.errors import LakeRefusedError, LakeUnavailableError
from zombi_platform.lake.storage import Stored

if TYPE_CHECKING:
    from zombi_platform.lake.storage import Storage

SCHEME = "file://"
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""A bucket has no directories: there all of these are files that are not there."""


class LocalDisk:
    def __init__(self, storage: Storage) -> None:
        self._warehouse = storage.warehouse

    def read(self, location: str) -> bytes:
        with self.errors(location):
            return Path(self.path(location)).read_bytes()

    def create(self, location: str, content: bytes) -> None:
        target = self.path(location)
        temporary = f"{target}.{secrets.token_hex(8)}.tmp"
        with self.errors(location):
            _make_directory(Path(target).parent)
            try:
                _write_durably(temporary, content)
                os.link(temporary, target)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            _sync_directory(Path(target).parent)

    def write(self, location: str, content: bytes) -> None:
        target = self.path(location)
        temporary = f"{target}.{secrets.token_hex(8)}.tmp"
        with self.errors(location):
            _make_directory(Path(target).parent)
            try:
                _write_durably(temporary, content)
                os.replace(temporary, target)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
            _sync_directory(Path(target).parent)

    def write_lazily(self, location: str, content: bytes) -> None:
        target = Path(self.path(location))
        with self.errors(location):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def find(self, location: str) -> Stored | None:
        with self.errors(location):
            try:
                return _stored(self.path(location))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def files(self, prefix: str) -> Iterator[Stored]:
        start = self.path(prefix)
        top = start if start.endswith("/") else str(Path(start).parent)
        with self.errors(prefix):
            for directory, _, names in os.walk(top, onerror=_raise_unless_missing):
                for name in sorted(names):
                    path = os.path.join(directory, name)
                    if path.startswith(start):
                        with suppress(FileNotFoundError):
                            yield _stored(path)

    def names(self, prefix: str) -> list[str]:
        directory, _, beginning = self.path(prefix).rpartition("/")
        with self.errors(prefix):
            try:
                with os.scandir(directory) as entries:
                    found = [entry for entry in entries if entry.name.startswith(beginning)]
                return [entry.name for entry in found if entry.is_file()]
            except FileNotFoundError:
                return []

    def directories(self, directory: str) -> list[str]:
        with self.errors(directory):
            try:
                with os.scandir(self.path(directory)) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except FileNotFoundError:
                return []

    def delete(self, locations: Sequence[str]) -> None:
        directories = set()
        for location in locations:
            path = Path(self.path(location))
            with self.errors(location), suppress(*NO_FILE):
                path.unlink()
                directories.add(path.parent)
        for directory in directories:
            with self.errors(SCHEME + str(directory)):
                _sync_directory(directory)

    def path(self, location: str) -> str:
        # Spark writes `file:/path` for the same place.
        return location.removeprefix(SCHEME).removeprefix("file:")

    def filesystem(self) -> fs.FileSystem:
        return fs.LocalFileSystem()

    @contextmanager
    def output(self, location: str) -> Iterator[Any]:
        path = self.path(location)
        _make_directory(Path(path).parent)
        with pa.OSFile(path, "wb") as sink:
            yield sink
        _sync_file(path)
        _sync_directory(Path(path).parent)

    @contextmanager
    def errors(self, location: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise _translated(error, location) from error

    def check(self, *, exclusive: bool) -> None:
        # A disk that can link at all links exclusively.
        probe = f"{self._warehouse}/.zombi-check-{secrets.token_hex(8)}"
        self.create(probe, b"")
        self.delete([probe])


def _translated(error: OSError, location: str) -> LakeUnavailableError | LakeRefusedError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LakeUnavailableError(
            f"no space left for {location}: free some, or move the warehouse (ZOMBI_WAREHOUSE)",
            code="DISK_FULL",
            retry_after_secs=30,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return LakeRefusedError(
            f"{location} is not open to this user: {error.strerror}; give it read and write access",
            code="ACCESS_DENIED",
        )
    return LakeUnavailableError(f"{location}: {error}", code="DISK_FAILED")


def _stored(path: str) -> Stored:
    found = os.stat(path)
    return Stored(SCHEME + path, found.st_size, found.st_mtime_ns // 1_000_000)


def _write_durably(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    with suppress(FileNotFoundError):
        _sync_file(str(directory))


def _make_directory(directory: Path) -> None:
    """Make it and its parents, each durable in its own parent."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with suppress(FileExistsError):
        directory.mkdir()
    _sync_directory(directory.parent)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
