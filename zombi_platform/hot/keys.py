"""RocksDB keys. Numbers are fixed-width hex, so byte order is number order.

Table names hold no colon (INV-9), so a prefix that ends in a colon never reaches into
another table. Keys of idempotency entries end in the producer's own bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

BLOCKS: Final = b"evt:"
FLUSH_WATERMARKS: Final = b"flush_wm:"
CLEANUP_WATERMARKS: Final = b"cleanup_wm:"
CONSUMERS: Final = b"consumer:"
EXPIRIES: Final = b"exp:"
CUTS: Final = b"cut:"
CUT_FILES: Final = b"cutfile:"
CUT_IDS: Final = b"cutid:"
TOMBSTONES: Final = b"tomb:"
TOMBSTONES_BY_TIME: Final = b"tombtime:"
SWEEPS: Final = b"sweep:"
LEASES: Final = b"lease:"
NOTES: Final = b"note:"
CONFIRMED: Final = b"confirmed"

IDEMPOTENCY_ENTRY: Final = struct.Struct(">QQ")
"""Value of an idempotency key: sequence, time in ms."""

AFTER: Final = b"\xff"
"""Appended to a prefix it gives a key past everything under that prefix."""


class PartitionId(NamedTuple):
    table: str
    partition: int


def partition_suffix(table: str, partition: int) -> bytes:
    return b"%s:%08x" % (table.encode(), partition)


def block_prefix(table: str, partition: int) -> bytes:
    return b"%s%s:" % (BLOCKS, partition_suffix(table, partition))


def block_key(prefix: bytes, first: int) -> bytes:
    return b"%s%016x" % (prefix, first)


def block_first(key: bytes) -> int:
    """The sequence of a block's first event, from its key."""
    return int(key[-16:], 16)


def idempotency_prefix(table: str, partition: int) -> bytes:
    return b"idem:%s:" % partition_suffix(table, partition)


def expiry_key(time_ms: int, number: int) -> bytes:
    return b"%s%016x:%08x" % (EXPIRIES, time_ms, number)


def expiry_time_ms(key: bytes) -> int:
    return int(key[len(EXPIRIES) : len(EXPIRIES) + 16], 16)


def consumer_key(group: str, table: str, partition: int) -> bytes:
    return b"%s%s:%s" % (CONSUMERS, group.encode(), partition_suffix(table, partition))


def cut_key(table: str, cut: int) -> bytes:
    return b"%s%s:%016x" % (CUTS, table.encode(), cut)


def cut_files_prefix(table: str, cut: int) -> bytes:
    return b"%s%s:%016x:" % (CUT_FILES, table.encode(), cut)


def cut_files_key(table: str, cut: int, split: int) -> bytes:
    return b"%s%08x" % (cut_files_prefix(table, cut), split)


def parse_cut(key: bytes, prefix: bytes) -> tuple[str, int]:
    """Table and id of a key `{prefix}{table}:{id:016x}[:…]`."""
    table, cut, *_ = key[len(prefix) :].split(b":", 2)
    return table.decode(), int(cut, 16)


def parse_partition(key: bytes, prefix: bytes) -> PartitionId:
    """Table and partition of a key `{prefix}{table}:{partition:08x}[:…]`."""
    table, partition, *_ = key[len(prefix) :].split(b":", 2)
    return PartitionId(table.decode(), int(partition, 16))


def idempotency_bytes(names: Sequence[bytes]) -> int:
    """What these keys and their values count against the limit of the hot buffer."""
    return sum(map(len, names)) + IDEMPOTENCY_ENTRY.size * len(names)
