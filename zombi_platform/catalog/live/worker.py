"""The staging process: writes blocks and snapshots of the live view for the gateway.

It is a process of its own because writing Parquet holds Python's lock for milliseconds at a
time, which ingest would pay for with its latency; for the same reason it gives way to others
on the processor. It serves one request after the other from its standard input and ends when
that closes, so that it never outlives the gateway. It remembers blocks it wrote, nothing else.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa
from pyiceberg.manifest import DataFile

from zombi_platform.catalog.live import messages
from zombi_platform.catalog.live.messages import (
    Done,
    Failed,
    Forget,
    Hello,
    Publish,
    Published,
    Reply,
    Request,
    Stage,
    Unknown,
)
from zombi_platform.catalog.live.parquet import write_block
from zombi_platform.catalog.live.snapshot import (
    Base,
    describe_block,
    manifests_of,
    metadata_of,
    read_base,
)
from zombi_platform.catalog.metadata import join, plain
from zombi_platform.lake.file_io import StorageIO, io_properties
from zombi_platform.lake.storage import Storage

NICENESS: Final = 5
BASES_MAX: Final = 64
WRITES_MAX: Final = 3


class Worker:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._io = StorageIO(io_properties(storage))
        self._threads = ThreadPoolExecutor(WRITES_MAX)
        self._blocks: dict[str, DataFile] = {}
        self._bases: dict[str, tuple[str, Base]] = {}

    def stage(self, request: Stage, rows: pa.Table) -> Done:
        content = write_block(request.table, request.ranges, rows)
        self._storage.write_lazily(request.location, content.to_pybytes())
        self._blocks[request.location] = describe_block(request.location, content)
        return Done()

    def publish(self, request: Publish) -> tuple[Published | Unknown, bytes]:
        if not self._blocks.keys() >= set(request.blocks):
            return Unknown(), b""
        base = self._base(request)
        blocks = [self._blocks[location] for location in request.blocks]
        stem = f"{request.directory}/{request.name}"
        files = manifests_of(base, blocks, request.snapshot_id, stem)
        listed = list(files)[-1] if files else None
        content = join(metadata_of(base, blocks, request.snapshot_id, listed, request.directory))
        location = f"{stem}.metadata.json"
        files[location] = content
        # At once: in a bucket each takes as long as all of them.
        list(self._threads.map(self._storage.write_lazily, files, files.values()))
        return Published(location, tuple(files), len(content)), content

    def forget(self, request: Forget) -> Done:
        for location in request.blocks:
            self._blocks.pop(location, None)
        return Done()

    def _base(self, request: Publish) -> Base:
        etag, base = self._bases.pop(request.table, (None, None))
        if base is None or etag != request.etag:
            base = read_base(request.base, plain(self._storage.read(request.base)), self._io)
        # Put back as the latest used.
        self._bases[request.table] = request.etag, base
        while len(self._bases) > BASES_MAX:
            del self._bases[next(iter(self._bases))]
        return base


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the source ends."""
    hello = messages.requests.decode(source.readline())
    assert isinstance(hello, Hello)
    worker = Worker(hello.storage)
    for line in iter(source.readline, b""):
        request = messages.requests.decode(line)
        # Read before anything can fail, so that the next line is a request again.
        rows = pa.ipc.open_stream(source).read_all() if isinstance(request, Stage) else None
        content = b""
        try:
            reply, content = _answer(worker, request, rows)
        except Exception as error:
            reply = Failed.of(error)
        sink.write(messages.line(reply) + content)
        sink.flush()


def _answer(worker: Worker, request: Request, rows: pa.Table | None) -> tuple[Reply, bytes]:
    match request:
        case Stage():
            return worker.stage(request, rows), b""
        case Publish():
            return worker.publish(request)
        case Forget():
            return worker.forget(request), b""
        case _:
            raise msgspec.ValidationError(f"{type(request).__name__} is not expected here")


def main() -> None:
    # Ctrl-C reaches the whole group; the gateway ends this process when it is done with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
