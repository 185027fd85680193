"""What runs in a Spark executor's Python: one split or merge a task, told of in one row.

Errors of this platform travel as rows, because Spark would try a refused task twice more
and then reduce the error to a text. Everything else is raised, and Spark's own retries
deal with it: a repeated task writes under new names, and files of the first one are known
to the gateway. No event crosses the JVM.
"""

from __future__ import annotations

import sys
import zipimport
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

import msgspec
import pyarrow as pa

from zombi_platform.errors import TransientError, ZombiError

ROW_SCHEMA: Final = "outcome binary"
NOTHING: Final = msgspec.Raw(msgspec.msgpack.encode(None))

T = TypeVar("T")
U = TypeVar("U")


class Failure(msgspec.Struct, frozen=True):
    """An error of this platform on its way from an executor."""

    kind: str
    code: str
    message: str
    retry_after_secs: int | None

    @staticmethod
    def of(error: ZombiError) -> Failure:
        wait = error.retry_after_secs if isinstance(error, TransientError) else None
        return Failure(type(error).__name__, error.code, str(error), wait)

    def to_error(self) -> ZombiError:
        kind = _kinds(ZombiError)[self.kind]
        if issubclass(kind, TransientError) and self.retry_after_secs is not None:
            return kind(self.message, code=self.code, retry_after_secs=self.retry_after_secs)
        return kind(self.message, code=self.code)


class Outcome(msgspec.Struct, frozen=True):
    """What became of one item: a result, or a failure."""

    result: msgspec.Raw = NOTHING
    failure: Failure | None = None


def work_rows(
    work: Callable[[T], U], items: Mapping[int, T], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: each incoming row is the place of an item to work on."""
    try:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                row = msgspec.msgpack.encode(_outcome(work, items[place]))
                yield pa.RecordBatch.from_arrays([pa.array([row], pa.binary())], ["outcome"])
    finally:
        _forget_zips()


def decode_outcome(row: bytes, result: type[U]) -> U | ZombiError | None:
    """What the work on one item came to, or the error that it ended with."""
    outcome = msgspec.msgpack.decode(row, type=Outcome)
    if outcome.failure is not None:
        return outcome.failure.to_error()
    return msgspec.msgpack.decode(outcome.result, type=result | None)


def _outcome(work: Callable[[T], U], item: T) -> Outcome:
    try:
        return Outcome(result=msgspec.Raw(msgspec.msgpack.encode(work(item))))
    except ZombiError as error:
        return Outcome(failure=Failure.of(error))


def _forget_zips() -> None:
    """Before each task Spark has Python read every zip and jar again that it ever imported
    from; with Iceberg's jars that is 0.3 CPU-seconds. What is not remembered is not reread."""
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def _kinds(root: type[ZombiError]) -> dict[str, type[ZombiError]]:
    found = {root.__name__: root}
    for kind in root.__subclasses__():
        found |= _kinds(kind)
    return found
