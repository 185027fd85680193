"""Short durable notes about a table on its way to Iceberg: a flush that was asked for, the
last failure, how far an external catalog has followed. They tell; nothing is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from zombi_platform.hot import keys
from zombi_platform.hot.buffer import HotBuffer
from zombi_platform.hot.partitions import Partitions
from zombi_platform.hot.store import Batch, Store


class FlushRequest(msgspec.Struct, frozen=True):
    """Somebody wants everything up to these sequences committed."""

    at_ms: int
    sequences: dict[int, int]
    """By partition."""


class Failure(msgspec.Struct, frozen=True):
    error: str
    code: str
    step: str
    transient: bool
    at_ms: int
    run_id: str | None = None
    url: str | None = None


class Registration(msgspec.Struct, frozen=True):
    """Which of our commits an external catalog has, and what keeps it from the next."""

    snapshot_id: int | None
    at_ms: int
    error: str | None = None


Note = FlushRequest | Failure | Registration
N = TypeVar("N", FlushRequest, Failure, Registration)

_NAMES: Final[Mapping[type[Note], bytes]] = {
    FlushRequest: b"request",
    Failure: b"failure",
    Registration: b"registration",
}


class Notes:
    def __init__(self, hot: HotBuffer) -> None:
        self._hot = hot
        self._notes: dict[tuple[type[Note], str], Note] = {}
        hot.follow(self._load)

    def _load(self, store: Store, _: Partitions) -> None:
        self._notes = {
            (kind, key.rpartition(b":")[2].decode()): msgspec.msgpack.decode(value, type=kind)
            for kind, name in _NAMES.items()
            for key, value in store.items(b"%s%s:" % (keys.NOTES, name))
        }

    def find(self, kind: type[N], table: str) -> N | None:
        note = self._notes.get((kind, table))
        return note if isinstance(note, kind) else None

    def tables(self) -> set[str]:
        return {table for _, table in self._notes}

    async def put(self, table: str, note: Note) -> None:
        async with self._hot.changing() as change:
            await change.run(_store_note, table, note)
            self._notes[type(note), table] = note

    async def request_flush(self, table: str, sequences: Mapping[int, int]) -> None:
        """Ask for everything up to these sequences, beside what was asked for before."""
        async with self._hot.changing() as change:
            before = self.find(FlushRequest, table)
            wanted = {} if before is None else dict(before.sequences)
            for partition, sequence in sequences.items():
                wanted[partition] = max(sequence, wanted.get(partition, 0))
            note = FlushRequest(time.time_ns() // 1_000_000, wanted)
            await change.run(_store_note, table, note)
            self._notes[FlushRequest, table] = note

    def settle(self, batch: Batch, table: str, flushed: Mapping[int, int]) -> list[type[Note]]:
        """Have a batch that records a commit take away what it settles; say what that is."""
        settled: list[type[Note]] = []
        request = self.find(FlushRequest, table)
        if request is not None and all(
            flushed.get(partition, 0) >= sequence
            for partition, sequence in request.sequences.items()
        ):
            settled.append(FlushRequest)
        if self.find(Failure, table) is not None:
            settled.append(Failure)
        for kind in settled:
            batch.delete(_key(kind, table))
        return settled

    def forget(self, table: str, settled: list[type[Note]]) -> None:
        """The batch of `settle` is written."""
        for kind in settled:
            self._notes.pop((kind, table), None)


def _store_note(store: Store, table: str, note: Note) -> None:
    batch = store.batch()
    batch.put(_key(type(note), table), msgspec.msgpack.encode(note))
    store.write_surely(batch)


def _key(kind: type[Note], table: str) -> bytes:
    return b"%s%s:%s" % (keys.NOTES, _NAMES[kind], table.encode())
