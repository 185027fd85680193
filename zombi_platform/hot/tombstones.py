"""Files in the lake that nothing refers to, or might come to nothing, and when to delete them.

A tombstone is put before its file is written and goes away in the batch that records the
file in a cut. So at any time each file is in a snapshot, in a cut, or here. A tombstone
is a word, not a deed: the sweeper still looks whether a snapshot refers to the file.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from zombi_platform.errors import ConflictError
from zombi_platform.hot import keys
from zombi_platform.hot.buffer import HotBuffer
from zombi_platform.hot.leases import Leases
from zombi_platform.hot.partitions import Partitions
from zombi_platform.hot.store import Batch, Store, View

TIME: Final = struct.Struct(">Q")
COUNT_MAX: Final = 1000
"""Due tombstones are counted up to here: whoever asks wants to know whether to sweep."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """What may be deleted if nothing refers to it; a prefix stands for all under it."""

    paths: tuple[str, ...]
    prefixes: tuple[str, ...]
    next: str | None
    """Where the next page begins; None when there is none."""


class Tombstones:
    def __init__(
        self, hot: HotBuffer, leases: Leases, clock_ms: Callable[[], int] | None = None
    ) -> None:
        self._hot = hot
        self._leases = leases
        self._clock_ms = clock_ms or (lambda: time.time_ns() // 1_000_000)
        self._swept_ms: dict[str, int] = {}
        """The latest time for which tombstones of a table were given out as due."""
        hot.follow(self._load)

    def _load(self, store: Store, _: Partitions) -> None:
        self._swept_ms = {
            key[len(keys.SWEEPS) :].decode(): TIME.unpack(value)[0]
            for key, value in store.items(keys.SWEEPS)
        }

    async def add(
        self,
        table: str,
        epoch: int,
        paths: Sequence[str],
        prefixes: Sequence[str],
        grace_secs: float,
    ) -> None:
        """Put tombstones; one that is there already is due no sooner than before."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            due_ms = self.now_ms(table) + int(grace_secs * 1000)
            names = [*_names(paths, prefixes)]
            await change.run(_put_all, table, names, due_ms)

    async def drop(
        self, table: str, epoch: int, paths: Sequence[str], prefixes: Sequence[str]
    ) -> None:
        """Take tombstones away whose files are deleted."""
        async with self._hot.changing() as change:
            self._leases.require(table, epoch)
            await change.run(_drop_all, table, [*_names(paths, prefixes)])

    async def due(self, table: str, after: str | None, limit: int) -> Doomed:
        """Those whose time has come, oldest first.

        That they were given out is stored: their files may be gone from now on, so no cut
        takes them any more, even if the clock is turned back.
        """
        async with self._hot.changing() as change:
            now_ms = self.now_ms(table)
            found = await change.run(_due, table, now_ms, after, limit)
            if found and now_ms != self._swept_ms.get(table):
                await change.run(_store_sweep, table, now_ms)
                self._swept_ms[table] = now_ms
        return Doomed(
            paths=tuple(item[18:] for item in found if item[17] == "f"),
            prefixes=tuple(item[18:] for item in found if item[17] == "p"),
            next=found[-1] if len(found) == limit else None,
        )

    def now_ms(self, table: str) -> int:
        """The time, never before that of the table's last sweep."""
        return max(self._clock_ms(), self._swept_ms.get(table, 0))


def count_due(source: Store | View, table: str, now_ms: int) -> int:
    return len(_due(source, table, now_ms, None, COUNT_MAX))


def adopt(store: Store, batch: Batch, table: str, paths: Iterable[str], now_ms: int) -> None:
    """Take the tombstones of files away that this batch records; each must still stand."""
    for path in paths:
        name = b"f" + path.encode()
        due_ms = _due_ms(store, table, name)
        if due_ms is None or due_ms <= now_ms:
            raise ConflictError(
                f"{path!r} was not announced, or so long ago that it may be deleted by now; "
                "announce a new path and write the file again",
                code="INTENT_MISSING" if due_ms is None else "INTENT_EXPIRED",
            )
        _drop(batch, table, name, due_ms)


def put(store: Store, batch: Batch, table: str, paths: Iterable[str], due_ms: int) -> None:
    """Put tombstones of files as part of a batch."""
    for name in _names(paths, ()):
        _put(store, batch, table, name, due_ms)


def _names(paths: Iterable[str], prefixes: Iterable[str]) -> Iterator[bytes]:
    for path in paths:
        yield b"f" + path.encode()
    for prefix in prefixes:
        yield b"p" + prefix.encode()


def _put_all(store: Store, table: str, names: list[bytes], due_ms: int) -> None:
    batch = store.batch()
    for name in dict.fromkeys(names):
        _put(store, batch, table, name, due_ms)
    store.write_surely(batch)


def _put(store: Store, batch: Batch, table: str, name: bytes, due_ms: int) -> None:
    before = _due_ms(store, table, name)
    if before is not None:
        if before >= due_ms:
            return
        batch.delete(_time_key(table, before, name))
    batch.put(_key(table, name), TIME.pack(due_ms))
    batch.put(_time_key(table, due_ms, name), b"")


def _drop_all(store: Store, table: str, names: list[bytes]) -> None:
    batch = store.batch()
    for name in dict.fromkeys(names):
        due_ms = _due_ms(store, table, name)
        if due_ms is not None:
            _drop(batch, table, name, due_ms)
    store.write_surely(batch)


def _drop(batch: Batch, table: str, name: bytes, due_ms: int) -> None:
    batch.delete(_key(table, name))
    batch.delete(_time_key(table, due_ms, name))


def _due(source: Store | View, table: str, now_ms: int, after: str | None, limit: int) -> list[str]:
    """Due tombstones after the given one, each as `{due:016x}:{f or p}{path}`."""
    prefix = b"%s%s:" % (keys.TOMBSTONES_BY_TIME, table.encode())
    found: list[str] = []
    cursor = source.iterator()
    # A zero byte makes the least key past the given one.
    cursor.seek(prefix if after is None else prefix + after.encode() + b"\0")
    while len(found) < limit and cursor.valid() and cursor.key().startswith(prefix):
        item = cursor.key()[len(prefix) :].decode()
        if int(item[:16], 16) > now_ms:
            break
        found.append(item)
        cursor.next()
    cursor.status()
    return found


def _store_sweep(store: Store, table: str, now_ms: int) -> None:
    batch = store.batch()
    batch.put(keys.SWEEPS + table.encode(), TIME.pack(now_ms))
    store.write_surely(batch)


def _due_ms(store: Store, table: str, name: bytes) -> int | None:
    value = store.get(_key(table, name))
    return None if value is None else int(TIME.unpack(value)[0])


def _key(table: str, name: bytes) -> bytes:
    return b"%s%s:%s" % (keys.TOMBSTONES, table.encode(), name)


def _time_key(table: str, due_ms: int, name: bytes) -> bytes:
    return b"%s%s:%016x:%s" % (keys.TOMBSTONES_BY_TIME, table.encode(), due_ms, name)
