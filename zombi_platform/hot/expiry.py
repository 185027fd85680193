"""Forgetting idempotency keys once their window is over.

Each group that brought new keys left one record with its time and their names. Expiry
walks those records in time order and deletes a record together with its keys, atomically:
a key is looked up as known until it is gone, and a key that comes back afterwards is new
in a newer record, so no order of events deletes a live key (INV-4). No scan of all keys is
ever made, and nothing is held in memory.
"""

from __future__ import annotations

from typing import Final

import msgspec

from zombi_platform.hot import keys
from zombi_platform.hot.store import Store

RECORDS_MAX: Final = 256
"""Records deleted in one batch; a record holds the keys of one group."""


def forget_keys(store: Store, before_ms: int) -> tuple[int, int]:
    """Delete one batch of keys older than `before_ms`; returns how many, and their bytes."""
    batch = store.batch()
    records = forgotten = size = 0
    for key, value in store.items(keys.EXPIRIES):
        if keys.expiry_time_ms(key) >= before_ms or records == RECORDS_MAX:
            break
        names = msgspec.msgpack.decode(value, type=list[bytes])
        for name in names:
            batch.delete_key(name)
        size += keys.idempotency_bytes(names)
        batch.delete(key)
        forgotten += len(names)
        records += 1
    if records:
        store.write_lazily(batch)
    return forgotten, size
