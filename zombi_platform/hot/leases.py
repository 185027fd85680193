"""Who may move a table towards Iceberg: one worker at a time, told apart by epochs.

An epoch is durable and only rises; a worker whose epoch has passed is refused whatever it
asks for. How long a lease lasts is kept in memory by a clock that never jumps. After a
restart the last holder may still be alive, so others wait one whole term for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from zombi_platform.errors import ConflictError, FencedError
from zombi_platform.hot import keys
from zombi_platform.hot.buffer import HotBuffer
from zombi_platform.hot.partitions import Partitions
from zombi_platform.hot.store import Store


class StoredLease(msgspec.Struct, frozen=True):
    epoch: int
    holder: str | None
    """None once it was released."""


@dataclass(frozen=True, slots=True)
class Holding:
    holder: str
    epoch: int
    expires_in_secs: float


class Leases:
    def __init__(
        self, hot: HotBuffer, term_secs: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hot = hot
        self.term_secs = term_secs
        self._clock = clock
        self._stored: dict[str, StoredLease] = {}
        self._ends: dict[str, float] = {}
        hot.follow(self._load)

    def _load(self, store: Store, _: Partitions) -> None:
        self._stored = {
            key[len(keys.LEASES) :].decode(): msgspec.msgpack.decode(value, type=StoredLease)
            for key, value in store.items(keys.LEASES)
        }
        end = self._clock() + self.term_secs
        for table in self._stored:
            self._ends.setdefault(table, end)

    def holding(self, table: str) -> Holding | None:
        """Who has the lease now."""
        lease = self._stored.get(table)
        left = self._ends.get(table, 0.0) - self._clock()
        if lease is None or lease.holder is None or left <= 0:
            return None
        return Holding(lease.holder, lease.epoch, left)

    def require(self, table: str, epoch: int) -> None:
        """Raise unless this is the epoch of the worker that last took the lease."""
        lease = self._stored.get(table)
        if lease is None or lease.epoch != epoch:
            raise FencedError(
                f"epoch {epoch} of table {table!r} is over: it is "
                f"{0 if lease is None else lease.epoch} now; stop, another worker goes on"
            )
        if lease.holder is None:
            raise FencedError(f"epoch {epoch} of table {table!r} was released; take a new lease")

    async def take(self, table: str, holder: str, epoch: int | None) -> int:
        """The epoch in which the holder has the lease: a new one, or the one it had."""
        async with self._hot.changing() as change:
            lease = self._stored.get(table) or StoredLease(0, None)
            if epoch is not None:
                self.require(table, epoch)
            held = self.holding(table)
            if epoch is None and held is not None and held.holder != holder:
                raise ConflictError(
                    f"table {table!r} is leased to {held.holder} in epoch {held.epoch} for "
                    f"{held.expires_in_secs:.1f} s more; retry when it is over",
                    code="LEASE_HELD",
                )
            if epoch is None and held is None:
                lease = StoredLease(lease.epoch + 1, holder)
                await change.run(_store_lease, table, lease)
                self._stored[table] = lease
            self._ends[table] = self._clock() + self.term_secs
            return lease.epoch

    async def release(self, table: str, epoch: int) -> None:
        async with self._hot.changing() as change:
            lease = self._stored.get(table)
            if lease is not None and lease == StoredLease(epoch, None):
                return
            self.require(table, epoch)
            lease = StoredLease(epoch, None)
            await change.run(_store_lease, table, lease)
            self._stored[table] = lease


def _store_lease(store: Store, table: str, lease: StoredLease) -> None:
    batch = store.batch()
    batch.put(keys.LEASES + table.encode(), msgspec.msgpack.encode(lease))
    store.write_surely(batch)
