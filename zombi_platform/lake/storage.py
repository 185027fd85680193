"""The object store or disk under the lake: one value that says where files are and moves bytes.

A `Storage` is frozen, picklable and free of pyiceberg, so an engine's task may carry it to
another process. Locations are URIs, `file:///…` or `s3://…`, as they stand in Iceberg's
metadata. What was written is durable when a method returns, except what is written lazily.
Every failure leaves as a `ZombiError` that says what to do; only "not there" and "there
already" stay `FileNotFoundError` and `FileExistsError`, because callers decide by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from zombi_platform.errors import SettingsError

if TYPE_CHECKING:
    from pyarrow import fs

    from zombi_platform.settings import Settings


@dataclass(frozen=True, slots=True)
class Stored:
    """A file as the storage knows it; one that took another's place differs in size or time."""

    location: str
    bytes: int
    modified_ms: int


class Backend(Protocol):
    """What a disk and an object store have in common."""

    def read(self, location: str) -> bytes: ...
    def create(self, location: str, content: bytes) -> None: ...
    def write(self, location: str, content: bytes) -> None: ...
    def write_lazily(self, location: str, content: bytes) -> None: ...
    def find(self, location: str) -> Stored | None: ...
    def files(self, prefix: str) -> Iterator[Stored]: ...
    def names(self, prefix: str) -> list[str]: ...
    def directories(self, directory: str) -> list[str]: ...
    def delete(self, locations: Sequence[str]) -> None: ...
    def path(self, location: str) -> str: ...
    def filesystem(self) -> fs.FileSystem: ...
    def output(self, location: str) -> Any: ...
    def errors(self, location: str) -> Any: ...
    def check(self, *, exclusive: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the lake is and how patiently it is talked to."""

    warehouse: str
    endpoint: str | None = None
    region: str = "us-east-1"
    tries: int = 5
    backoff_initial_ms: int = 100
    backoff_max_ms: int = 10_000
    timeout_secs: float = 20.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Storage:
        return cls(
            warehouse=_warehouse(settings),
            endpoint=settings.s3_endpoint,
            region=settings.s3_region,
            tries=settings.s3_max_retries + 1,
            backoff_initial_ms=settings.s3_retry_initial_ms,
            backoff_max_ms=settings.s3_retry_max_ms,
            timeout_secs=settings.s3_timeout_secs,
        )

    @property
    def is_s3(self) -> bool:
        return self.warehouse.startswith("s3://")

    def table_location(self, table: str) -> str:
        return f"{self.warehouse}/{table}"

    def hour_directory(self, table: str, hour: int, partition: int) -> str:
        """Where files of an hour (since 1970) and a partition live, without a final slash."""
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
        return (
            f"{self.table_location(table)}/data/event_date={moment:%Y-%m-%d}"
            f"/event_hour={moment:%H}/partition={partition}"
        )

    def read(self, location: str) -> bytes:
        """The whole file; `FileNotFoundError` if there is none."""
        return _backend(self).read(location)

    def create(self, location: str, content: bytes) -> None:
        """Write a file that must not exist, all or nothing; `FileExistsError` if it does.

        A lost answer is looked up: if the file holds exactly this content, it was ours, so
        contents must be unique to their writer.
        """
        _backend(self).create(location, content)

    def write(self, location: str, content: bytes) -> None:
        """Write a file, replacing what is there. Readers see the old or the new one, whole."""
        _backend(self).write(location, content)

    def write_lazily(self, location: str, content: bytes) -> None:
        """Write a new file that may be lost in a crash without harm: it can be made again."""
        _backend(self).write_lazily(location, content)

    def find(self, location: str) -> Stored | None:
        """The file at exactly this location, if there is one."""
        return _backend(self).find(location)

    def exists(self, location: str) -> bool:
        return self.find(location) is not None

    def files(self, prefix: str) -> Iterator[Stored]:
        """Every file whose location begins with the prefix."""
        return _backend(self).files(prefix)

    def names(self, prefix: str) -> list[str]:
        """Names of the files directly in the prefix's directory that begin with its last part."""
        return _backend(self).names(prefix)

    def directories(self, directory: str) -> list[str]:
        """Names of the directories directly below one."""
        return _backend(self).directories(directory)

    def delete(self, locations: Iterable[str]) -> None:
        """Delete files; one that is not there is no error."""
        _backend(self).delete(list(locations))

    def path(self, location: str) -> str:
        """The location as `filesystem()` names it."""
        return _backend(self).path(location)

    def is_below(self, location: str, directory: str) -> bool:
        """Whether a location, or a prefix of some, is below a directory by its name alone.

        A name with `..`, `.` or an empty part is not: it may be another name of a place that
        is elsewhere, or of a file that is known by its plain name. Nor is one with a zero byte.
        """
        top = self.path(directory).rstrip("/") + "/"
        inner = self.path(location).removeprefix(top)
        *parents, last = inner.split("/")
        odd = {"", ".", ".."} & set(parents) or last in (".", "..") or "\0" in inner
        return self.path(location).startswith(top) and not odd

    def filesystem(self) -> fs.FileSystem:
        """The pyarrow filesystem; its errors are raw, see `errors`."""
        return _backend(self).filesystem()

    @contextmanager
    def output(self, location: str) -> Iterator[Any]:
        """A pyarrow stream for a large file; directories are made, and it is durable at the end."""
        with self.errors(location), _backend(self).output(location) as sink:
            yield sink

    @contextmanager
    def errors(self, location: str) -> Iterator[None]:
        """Turn what the disk, pyarrow or boto3 raise inside into errors of this platform."""
        with _backend(self).errors(location):
            yield

    def check(self, *, exclusive: bool) -> None:
        """Raise if the warehouse cannot be written, or if `create` is not exclusive there."""
        _backend(self).check(exclusive=exclusive)


@lru_cache(maxsize=16)
def _backend(storage: Storage) -> Backend:
    # Imported late: boto3 costs a third of a second that a local lake need not pay.
    if storage.is_s3:
        from zombi_platform.lake.object_store import ObjectStore

        return ObjectStore(storage)
    from zombi_platform.lake.local_disk import LocalDisk

    return LocalDisk(storage)


def _warehouse(settings: Settings) -> str:
    if settings.warehouse is None and settings.s3_bucket is not None:
        path = settings.storage_path.strip("/")
        return f"s3://{settings.s3_bucket}/{path}".rstrip("/")
    if settings.warehouse is None:
        return local_location(settings.data_dir / "warehouse")
    parts = urlsplit(settings.warehouse)
    if parts.scheme == "s3" and parts.netloc:
        return settings.warehouse.rstrip("/")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return local_location(Path(parts.path))
    if parts.scheme == "":
        return local_location(Path(settings.warehouse))
    raise SettingsError(
        f"ZOMBI_WAREHOUSE={settings.warehouse!r}: must be s3://bucket/path, file:///path or a path"
    )


def local_location(path: Path) -> str:
    """The URI of a path on this disk, unquoted: Iceberg's readers do not unquote either."""
    absolute = str(path.absolute())
    if any(character in absolute for character in "?#%"):
        raise SettingsError(f"the warehouse path {absolute!r} must be free of ?, # and %")
    return "file://" + absolute
