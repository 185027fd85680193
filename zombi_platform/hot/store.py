"""RocksDB as the hot buffer uses it: two column families, one durability.

Blocks and watermarks live in the default family, idempotency keys in one of their own that
is tuned for lookups of keys that are mostly absent. Only this process may hold the
database; a second opener is told who is in the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from rocksdict import (
    BlockBasedOptions,
    Cache,
    ColumnFamily,
    DbClosedError,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from zombi_platform.errors import HotStorageError, StartupError
from zombi_platform.hot.keys import AFTER
from zombi_platform.settings import Settings

Cursor = RdictIter

DIRECTORY: Final = "hot"
KEYS_FAMILY: Final = "idem"
WAL_BYTES_MAX: Final = 512 * 2**20
KEYS_WRITE_BUFFER_BYTES: Final = 16 * 2**20
OPEN_FILES_MAX: Final = 512


class Store:
    """An open database. Methods are thread-safe; iterators belong to one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.path = settings.data_dir / DIRECTORY
        self._db = self._open()
        self._keys = self._db.get_column_family(KEYS_FAMILY)
        self._keys_handle: ColumnFamily | None = self._db.get_column_family_handle(KEYS_FAMILY)
        self._at_once = self._write_options(no_slowdown=True)
        self._patient = self._write_options()
        self._lazy = self._write_options(sync=False)
        self._sure = self._write_options()
        # A synced record takes all before it in the log to the disk.
        self._sure.sync = True
        self._sure.disable_wal = False  # type: ignore[method-assign, assignment]

    def batch(self) -> Batch:
        if self._keys_handle is None:
            raise HotStorageError("the hot buffer is being reopened")
        return Batch(self._keys_handle)

    def write_at_once(self, batch: Batch) -> bool:
        """Write unless RocksDB would stall; False means that nothing was written.

        The batch is used up either way.
        """
        try:
            self._db.write(batch.raw, self._at_once)
        except Exception as error:
            if "stall" in str(error).lower():
                return False
            raise HotStorageError(f"RocksDB refused a write: {error}") from error
        return True

    def write(self, batch: Batch) -> None:
        """Write with the durability of an ack, waiting out a stall."""
        self._write(batch, self._patient)

    def write_surely(self, batch: Batch) -> None:
        """Write so that it survives a crash of the machine, whatever an ack means here.

        What is recorded about the lake must last as long as the lake does, or files would
        be forgotten and sequences given out again.
        """
        self._write(batch, self._sure)

    def secure(self) -> None:
        """Make everything written so far survive a crash of the machine."""
        if self._settings.durability == "none":
            try:
                # Blocks first: an event without its key is better than a key without one.
                self._db.flush()
                self._keys.flush()
            except Exception as error:
                raise HotStorageError(f"RocksDB could not flush: {error}") from error

    def write_lazily(self, batch: Batch) -> None:
        """Write what may be lost in a crash without harm, because it only reorders."""
        self._write(batch, self._lazy)

    def _write(self, batch: Batch, options: WriteOptions) -> None:
        try:
            self._db.write(batch.raw, options)
        except Exception as error:
            raise HotStorageError(f"RocksDB refused a write: {error}") from error

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._db.get(key)
        return value

    def get_keys(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Look many idempotency keys up at once."""
        if len(keys) == 1:
            return [self._keys.get(keys[0])]
        values = self._keys.get(list(keys))
        return list(values or ())

    def iterator(self) -> Cursor:
        """A cursor over the default family as it is now."""
        options = ReadOptions()
        # Blocks are read once on their way out: kept in the cache, they only cost memory.
        options.fill_cache(False)  # type: ignore[call-arg]  # the stubs lack its argument
        return self._db.iter(options)

    def view(self) -> View:
        """The default family as it is now, for several reads one after another."""
        return View(self.iterator())

    def items(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Everything under a prefix, in key order."""
        return _items(self.iterator(), prefix)

    def last_under(self, prefix: bytes) -> tuple[bytes, bytes] | None:
        """The entry with the highest key under a prefix."""
        cursor = self.iterator()
        cursor.seek_for_prev(prefix + AFTER)
        if not cursor.valid() or not cursor.key().startswith(prefix):
            cursor.status()
            return None
        return cursor.key(), cursor.value()

    def disk_bytes(self) -> int:
        """Bytes of all files of the database."""
        return sum(entry.stat().st_size for entry in os.scandir(self.path) if entry.is_file())

    def keys_bytes(self) -> int:
        """Estimated bytes of the idempotency keys."""
        return self._keys.property_int_value("rocksdb.estimate-live-data-size") or 0

    def close(self) -> None:
        """Close the database; harmless when it is closed already.

        Closing flushes. After a failed write that fails too, which costs nothing where a
        log holds the acked events; without one it is their loss and raises.
        """
        self._keys_handle = None
        for part in (self._keys, self._db):
            try:
                part.close()
            except DbClosedError:
                continue
            except Exception as error:
                if self._settings.durability == "none":
                    raise HotStorageError(f"RocksDB could not flush: {error}") from error

    def _open(self) -> Rdict:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartupError(
                f"cannot write to the data directory {self.path}: {error.strerror or error}; "
                "set ZOMBI_DATA_DIR to a directory this user can write"
            ) from error
        try:
            return Rdict(
                str(self.path), self._options(), column_families={KEYS_FAMILY: self._keys_options()}
            )
        except Exception as error:
            if "lock" in str(error).lower():
                raise StartupError(
                    f"the data directory {self.path} is in use by another gateway; "
                    "stop it or set ZOMBI_DATA_DIR to another directory"
                ) from error
            raise StartupError(f"cannot open the hot buffer in {self.path}: {error}") from error

    def _options(self) -> Options:
        settings = self._settings
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_write_buffer_size(settings.rocksdb_write_buffer_mb * 2**20)
        options.set_max_write_buffer_number(settings.rocksdb_max_write_buffers)
        # Blocks die young: most are deleted after the flush to Iceberg, so it pays to let them
        # die in level 0 instead of rewriting them first. Past the trigger writes go on while a
        # compaction runs, and level 1 takes what level 0 may hold.
        trigger = settings.rocksdb_l0_compaction_trigger
        options.set_level_zero_file_num_compaction_trigger(trigger)
        options.set_level_zero_slowdown_writes_trigger(3 * trigger)
        options.set_level_zero_stop_writes_trigger(4 * trigger)
        options.set_max_bytes_for_level_base(trigger * settings.rocksdb_write_buffer_mb * 2**20)
        options.set_target_file_size_base(settings.rocksdb_target_file_size_mb * 2**20)
        # Blocks are short-lived and read once: compressing them costs more than it saves.
        options.set_compression_type(DBCompressionType.none())
        options.set_block_based_table_factory(self._table_options(bloom=False))
        options.set_max_background_jobs(2)
        options.set_max_total_wal_size(WAL_BYTES_MAX)
        options.set_max_open_files(OPEN_FILES_MAX)
        options.set_keep_log_file_num(4)
        options.set_max_log_file_size(4 * 2**20)
        # A torn record at the end of the log is a crash; one in the middle is lost acks, and
        # opening must fail rather than hide it.
        options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
        # Without a log the families must reach the disk together, or a key could outlive
        # the event it stands for.
        options.set_atomic_flush(settings.durability == "none")
        return options

    def _keys_options(self) -> Options:
        options = Options(raw_mode=True)
        options.set_write_buffer_size(KEYS_WRITE_BUFFER_BYTES)
        options.set_memtable_whole_key_filtering(True)
        options.set_memtable_prefix_bloom_ratio(0.1)
        options.set_block_based_table_factory(self._table_options(bloom=True))
        return options

    def _table_options(self, *, bloom: bool) -> BlockBasedOptions:
        table = BlockBasedOptions()
        table.set_block_size(self._settings.rocksdb_block_size_kb * 2**10)
        table.set_block_cache(Cache(self._settings.rocksdb_block_cache_mb * 2**20 // 2))
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        if bloom:
            table.set_bloom_filter(10, False)
        return table

    def _write_options(self, *, no_slowdown: bool = False, sync: bool = True) -> WriteOptions:
        options = WriteOptions()
        options.sync = sync and self._settings.durability == "fsync"
        # The stubs call it a method; it is a plain attribute.
        options.disable_wal = self._settings.durability == "none"  # type: ignore[method-assign, assignment]
        options.no_slowdown = no_slowdown
        return options


class View:
    """A moment of the default family; what is written or deleted later does not show.

    It is one cursor, because cursors of rocksdict's own snapshots show the present. So a
    view is read in one place at a time: a new read moves the cursor of the one before.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def iterator(self) -> Cursor:
        return self._cursor

    def items(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Everything under a prefix, in key order."""
        return _items(self._cursor, prefix)


class Batch:
    """Changes that become visible and durable together."""

    __slots__ = ("_keys", "raw")

    def __init__(self, keys: ColumnFamily) -> None:
        self.raw = WriteBatch(raw_mode=True)
        self._keys = keys

    def put(self, key: bytes, value: bytes) -> None:
        self.raw.put(key, value)

    def delete(self, key: bytes) -> None:
        self.raw.delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete everything from `start` up to but not including `end`."""
        self.raw.delete_range(start, end)

    def put_key(self, key: bytes, value: bytes) -> None:
        """Remember an idempotency key."""
        self.raw.put(key, value, self._keys)

    def delete_key(self, key: bytes) -> None:
        self.raw.delete(key, self._keys)


def _items(cursor: Cursor, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    cursor.seek(prefix)
    while cursor.valid():
        key: bytes = cursor.key()
        if not key.startswith(prefix):
            break
        yield key, cursor.value()
        cursor.next()
    cursor.status()
