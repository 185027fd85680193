"""How pyiceberg reads and writes files here: through `Storage`, durably.

pyiceberg's own FileIO does not fsync, so that a power cut could leave a committed snapshot
with an empty manifest, and it spends three requests on S3 where one does. Metadata is
small and moved whole; Parquet is read in ranges.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.typedef import EMPTY_DICT, Properties

from zombi_platform.lake.storage import Storage

IMPLEMENTATION: Final = "py-io-impl"


def io_properties(storage: Storage) -> dict[str, str]:
    """Catalog properties that make pyiceberg use this FileIO with this storage."""
    named = {
        "zombi.io.warehouse": storage.warehouse,
        "zombi.io.endpoint": storage.endpoint or "",
        "zombi.io.region": storage.region,
        "zombi.io.tries": str(storage.tries),
        "zombi.io.backoff-initial-ms": str(storage.backoff_initial_ms),
        "zombi.io.backoff-max-ms": str(storage.backoff_max_ms),
        "zombi.io.timeout-secs": str(storage.timeout_secs),
    }
    return {IMPLEMENTATION: f"{StorageIO.__module__}.{StorageIO.__qualname__}", **named}


def _storage_of(properties: Mapping[str, str]) -> Storage:
    return Storage(
        warehouse=properties["zombi.io.warehouse"],
        endpoint=properties["zombi.io.endpoint"] or None,
        region=properties["zombi.io.region"],
        tries=int(properties["zombi.io.tries"]),
        backoff_initial_ms=int(properties["zombi.io.backoff-initial-ms"]),
        backoff_max_ms=int(properties["zombi.io.backoff-max-ms"]),
        timeout_secs=float(properties["zombi.io.timeout-secs"]),
    )


class StorageIO(FileIO):
    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self.storage = _storage_of(properties)

    def new_input(self, location: str) -> InputFile:
        return _Input(self.storage, location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(self.storage, location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self.storage.delete([location if isinstance(location, str) else location.location])


class _Input(InputFile):
    def __init__(self, storage: Storage, location: str) -> None:
        super().__init__(location)
        self._storage = storage

    def __len__(self) -> int:
        with self._storage.errors(self.location):
            path = self._storage.path(self.location)
            return int(self._storage.filesystem().get_file_info(path).size)

    def exists(self) -> bool:
        return self._storage.exists(self.location)

    def open(self, seekable: bool = True) -> InputStream:
        if not self.location.endswith(".parquet"):
            return io.BytesIO(self._storage.read(self.location))
        with self._storage.errors(self.location):
            path = self._storage.path(self.location)
            stream: InputStream = self._storage.filesystem().open_input_file(path)
            return stream


class _Output(OutputFile):
    def __init__(self, storage: Storage, location: str) -> None:
        super().__init__(location)
        self._storage = storage
        self._bytes = 0

    def __len__(self) -> int:
        return self._bytes

    def exists(self) -> bool:
        return self._storage.exists(self.location)

    def to_input_file(self) -> InputFile:
        return _Input(self._storage, self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Buffer(self, overwrite)

    def finish(self, content: bytes, overwrite: bool) -> None:
        store = self._storage.write if overwrite else self._storage.create
        store(self.location, content)
        self._bytes = len(content)


class _Buffer(io.BytesIO):
    """Collects a small file and stores it when it is closed without an error."""

    def __init__(self, target: _Output, overwrite: bool) -> None:
        super().__init__()
        self._target = target
        self._overwrite = overwrite
        self._failed = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._failed = kind is not None
        self.close()

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            if not self._failed:
                self._target.finish(content, self._overwrite)

    def __del__(self, *ignored: Any) -> None:
        self._failed = True
        super().close()
