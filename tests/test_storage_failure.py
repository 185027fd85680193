"""RocksDB refuses writes: callers are told, nothing acked is lost, nothing comes twice, and
the gateway goes on by itself when the disk does.

The limit on the size of a file (`RLIMIT_FSIZE`) of the running gateway stands in for a full
disk: the kernel cuts a write short and refuses the next, in the middle of RocksDB's log.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway import Gateway, running
from tests.test_hot_buffer import append, opened, segment
from zombi_platform.errors import HotStorageError
from zombi_platform.hot.store import Store
from zombi_platform.settings import Settings

WRITERS = 6
TINY_MEMTABLES: dict[str, Any] = {
    "durability": "wal",
    "rocksdb_write_buffer_mb": 1,
    "rocksdb_max_write_buffers": 2,
}
UNLIMITED = resource.RLIM_INFINITY


def limit_files(gateway: Gateway, size: int) -> None:
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))


@dataclass
class Writer:
    """Sends numbered events with keys, each one again until it is acked."""

    name: str
    url: str
    stop: threading.Event
    acked: dict[str, tuple[int, int]] = field(default_factory=dict)
    refused: int = 0
    unexpected: list[str] = field(default_factory=list)

    def run(self) -> None:
        number = 0
        with httpx.Client(timeout=60) as client:
            while not self.stop.is_set() and not self.unexpected:
                self.deliver(client, f"{self.name}-{number}", number % 2)
                number += 1

    def deliver(self, client: httpx.Client, key: str, partition: int) -> None:
        event = {"payload": key + "." * 200, "partition": partition, "idempotency_key": key}
        while not self.stop.is_set():
            answer = client.post(f"{self.url}/tables/t", json=event)
            if answer.status_code == 202:
                self.acked[key] = (partition, answer.json()["offset"])
                return
            self.refused += 1
            code = answer.json()["code"]
            if (answer.status_code, code) != (503, "HOT_STORAGE_UNAVAILABLE"):
                self.unexpected.append(answer.text)
                return
            assert int(answer.headers["retry-after"]) >= 1
            self.stop.wait(0.01)


def read_all(gateway: Gateway) -> dict[str, tuple[int, int]]:
    """Place of every key; asserts that sequences have no gap and keys come once."""
    found: dict[str, tuple[int, int]] = {}
    for partition in (0, 1):
        offset, more = 1, True
        while more:
            query = {"partition": partition, "offset": offset, "limit": 10_000}
            page = httpx.get(f"{gateway.url}/tables/t", params=query, timeout=60).json()
            for record in page["records"]:
                assert record["sequence"] == offset, "a gap, or a sequence twice"
                assert record["idempotency_key"] not in found, "an event twice"
                assert record["payload"].rstrip(".") == record["idempotency_key"]
                found[record["idempotency_key"]] = (partition, offset)
                offset += 1
            more = page["has_more"]
    return found


def log_size(data_dir: Path) -> int:
    return max(file.stat().st_size for file in (data_dir / "hot").glob("*.log"))


def wait_for(condition: object, pause: threading.Event) -> None:
    assert callable(condition)
    while not condition():
        pause.wait(0.02)


@pytest.mark.parametrize("durability", ["fsync", "wal"])
def test_a_disk_that_refuses_writes_costs_no_acked_event(tmp_path: Path, durability: str) -> None:
    with running(tmp_path, durability=durability) as gateway:
        stop, pause = threading.Event(), threading.Event()
        writers = [Writer(f"w{i}", gateway.url, stop) for i in range(WRITERS)]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        for thread in threads:
            thread.start()

        def acked() -> int:
            return sum(len(writer.acked) for writer in writers)

        def refused() -> int:
            return sum(writer.refused for writer in writers)

        try:
            # Three times the log hits the limit somewhere in the middle of a write.
            for _ in range(3):
                before, refusals = acked(), refused()
                wait_for(lambda: acked() > before + 50, pause)  # noqa: B023
                limit_files(gateway, log_size(tmp_path) + 3_000)
                wait_for(lambda: refused() > refusals, pause)  # noqa: B023
                limit_files(gateway, UNLIMITED)
            # Now nothing can be written at all, so that reopening fails as well.
            before = acked()
            wait_for(lambda: acked() > before + 50, pause)
            limit_files(gateway, 0)
            refusals = refused()
            wait_for(lambda: refused() > refusals + 20 * WRITERS, pause)
            ready = httpx.get(f"{gateway.url}/health/ready")
            assert (ready.status_code, ready.json()["hot_storage"]["status"]) == (503, "error")
            limit_files(gateway, UNLIMITED)
            before = acked()
            wait_for(lambda: acked() > before + 50, pause)
            assert httpx.get(f"{gateway.url}/health/ready").status_code == 200
        finally:
            limit_files(gateway, UNLIMITED)
            stop.set()
            for thread in threads:
                thread.join()
        assert not [writer.unexpected for writer in writers if writer.unexpected]
        expected = {key: place for writer in writers for key, place in writer.acked.items()}
        found = read_all(gateway)
        assert {key: found.get(key) for key in expected} == expected
        assert len(found) <= len(expected) + WRITERS
        assert gateway.stop() == 0
    with running(tmp_path, durability=durability) as again:
        assert read_all(again) == found


def test_reads_and_offsets_answer_while_the_disk_refuses(tmp_path: Path) -> None:
    with running(tmp_path, durability="wal") as gateway:
        event = {"payload": "x" * 100}
        assert httpx.post(f"{gateway.url}/tables/t", json=event).status_code == 202
        limit_files(gateway, 0)
        try:
            assert httpx.post(f"{gateway.url}/tables/t", json=event).status_code == 503
            commit = {"topic": "t", "offset": 1}
            kept = httpx.post(f"{gateway.url}/consumers/g/commit", json=commit)
            assert (kept.status_code, kept.json()["code"]) == (503, "HOT_STORAGE_UNAVAILABLE")
            for _ in range(50):
                page = httpx.get(f"{gateway.url}/tables/t")
                assert page.status_code in (200, 503), page.text
                assert page.status_code == 503 or page.json()["count"] == 1
                tables = httpx.get(f"{gateway.url}/tables")
                assert json.loads(tables.content)["tables"][0]["events"] == 1
        finally:
            limit_files(gateway, UNLIMITED)
        pause = threading.Event()
        wait_for(
            lambda: httpx.post(f"{gateway.url}/tables/t", json=event).status_code == 202, pause
        )
        assert httpx.get(f"{gateway.url}/tables/t").json()["count"] == 2


def test_a_write_that_would_stall_is_written_by_another_batch(tmp_path: Path) -> None:
    """RocksDB falls behind when memtables are tiny; it says so instead of blocking us."""
    store = Store(Settings(data_dir=tmp_path, **TINY_MEMTABLES))
    stalled = 0
    for number in range(500):
        key, value = b"%08d" % number, bytes(400_000)
        batch = store.batch()
        batch.put(key, value)
        if not store.write_at_once(batch):
            stalled += 1
            assert store.get(key) is None
            again = store.batch()
            again.put(key, value)
            store.write(again)
        if stalled > 3:
            break
    assert stalled > 3
    store.close()


def test_stalls_delay_acks_and_fail_none(tmp_path: Path) -> None:
    async def load() -> list[int]:
        async with opened(Settings(data_dir=tmp_path, **TINY_MEMTABLES)) as hot:
            acks = [await append(hot, "t", segment([bytes(400_000)])) for _ in range(150)]
            assert hot.failure is None
            return [offset for [[offset]] in acks]

    assert asyncio.run(load()) == list(range(1, 151))


def test_a_change_that_breaks_off_lets_go_of_the_database(tmp_path: Path) -> None:
    """Without the collector's help: it may not come by for hours."""

    def break_off(store: Store) -> None:
        batch = store.batch()
        batch.put(b"key", b"value")
        raise OverflowError("not foreseen")

    async def scenario() -> None:
        async with opened(Settings(data_dir=tmp_path)) as hot, asyncio.timeout(60):
            await append(hot, "t", segment([b"a"]))
            with pytest.raises(HotStorageError, match="not foreseen"):
                async with hot.changing() as change:
                    await change.run(break_off)
            while hot.failure is not None:
                await asyncio.sleep(0.02)
            assert await append(hot, "t", segment([b"b"])) == [[2]]

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
