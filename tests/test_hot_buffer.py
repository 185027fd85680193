"""The hot buffer on a real RocksDB: sequences, idempotency, restart, reads, deletion."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from zombi_platform.errors import StartupError, ZombiError
from zombi_platform.hot import Append, HeaderColumns, HotBuffer, Segment
from zombi_platform.hot.blocks import lengths_of
from zombi_platform.hot.merging import FAN_IN
from zombi_platform.settings import Settings


def segment(
    payloads: Sequence[bytes],
    partition: int = 0,
    keys: list[bytes] | None = None,
    ts: int = 1_700_000_000_000,
    headers: list[dict[str, str] | None] | None = None,
) -> Segment:
    count = len(payloads)
    return Segment(
        partition=partition,
        count=count,
        ts_min=ts,
        ts_max=ts + count - 1,
        timestamps=struct.pack(f"<{count}q", *range(ts, ts + count)),
        payload_lengths=lengths_of(payloads),
        payloads=b"".join(payloads),
        keys=keys,
        headers=None if headers is None else HeaderColumns.of(headers),
    )


async def append(hot: HotBuffer, table: str, *segments: Segment) -> list[list[int]]:
    """Submit one request and wait for its ack; the offsets of each segment."""
    acked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(_: Append, error: ZombiError | None) -> None:
        if error is None:
            acked.set_result(None)
        else:
            acked.set_exception(error)

    hot.submit(Append(table, list(segments), done))
    await acked
    return [s.offsets or list(range(s.first, s.first + s.count)) for s in segments]


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[HotBuffer]:
    hot = HotBuffer(settings)
    try:
        yield hot
    finally:
        await hot.close()


def rows(hot: HotBuffer, table: str, partition: int | None = None, **options: int) -> pa.Table:
    reading = hot.reading(
        table,
        partition,
        options.get("offset", 0),
        options.get("limit", 10**6),
        options.get("since"),
    )
    batches = list(reading.batches)
    return pa.Table.from_batches(batches) if batches else pa.table({"sequence": []})


@pytest.fixture(params=["fsync", "wal", "none"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, durability=request.param)


async def write_and_restart(settings: Settings) -> None:
    async with opened(settings) as hot:
        assert await append(hot, "orders", segment([b"a", b"b"])) == [[1, 2]]
        assert await append(hot, "orders", segment([b"c"], keys=[b"k"])) == [[3]]
    async with opened(settings) as hot:
        assert await append(hot, "orders", segment([b"again"], keys=[b"k"])) == [[3]]
        assert await append(hot, "orders", segment([b"d"])) == [[4]]
        assert rows(hot, "orders", 0)["payload"].to_pylist() == [b"a", b"b", b"c", b"d"]


def test_sequences_and_keys_continue_after_a_restart(settings: Settings) -> None:
    asyncio.run(write_and_restart(settings))


def test_one_key_in_concurrent_requests_and_twice_in_a_bulk_gets_one_offset(
    settings: Settings,
) -> None:
    async def scenario() -> None:
        async with opened(settings) as hot:
            answers = await asyncio.gather(
                *(append(hot, "t", segment([b"x"], keys=[b"same"])) for _ in range(50))
            )
            assert answers == [[[1]]] * 50
            bulk = segment([b"n", b"x", b"y", b"y2"], keys=[b"", b"same", b"two", b"two"])
            assert await append(hot, "t", bulk) == [[2, 1, 3, 3]]
            assert rows(hot, "t", 0)["payload"].to_pylist() == [b"x", b"n", b"y"]

    asyncio.run(scenario())


def test_partitions_with_more_and_fewer_digits_are_all_read(settings: Settings) -> None:
    numbers = [8, 9, 10, 99, 4294967295]

    async def scenario() -> None:
        async with opened(settings) as hot:
            await append(hot, "t", *(segment([b"%d" % n, b"."], n) for n in numbers))
        async with opened(settings) as hot:
            assert list(hot.watermarks("t")) == numbers
            for n in numbers:
                assert rows(hot, "t", n)["payload"].to_pylist() == [b"%d" % n, b"."]
                [batch] = hot.scan("t", n, 2, 2)
                assert batch["payload"].to_pylist() == [b"."]
            everything = rows(hot, "t")
            assert everything["partition"].to_pylist() == numbers * 2

    asyncio.run(scenario())


def test_small_blocks_are_merged_and_keep_every_event(settings: Settings) -> None:
    async def scenario() -> None:
        async with opened(settings) as hot:
            for i in range(FAN_IN * 3):
                headers: list[dict[str, str] | None] = [{"n": str(i)}] if i % 2 else [None]
                key = [b"k%d" % i] if i % 3 else None
                await append(hot, "t", segment([b"%d" % i], keys=key, headers=headers, ts=i))
            member = hot.partitions.known("t")[0]
            while len(member.small) >= FAN_IN:
                await asyncio.sleep(0.01)
            table = rows(hot, "t", 0)
            assert table["payload"].to_pylist() == [b"%d" % i for i in range(FAN_IN * 3)]
            assert table["idempotency_key"].to_pylist()[:4] == [None, "k1", "k2", None]
            assert table["headers"].to_pylist()[:2] == [None, [("n", "1")]]
            assert rows(hot, "t", since=40)["timestamp_ms"].to_pylist() == list(range(40, 48))

    asyncio.run(scenario())


def test_keys_are_forgotten_after_their_window(settings: Settings) -> None:
    async def scenario() -> None:
        async with opened(replace(settings, idempotency_window_secs=1)) as hot:
            while True:
                [[offset]] = await append(hot, "t", segment([b"x"], keys=[b"k"]))
                if offset == 2:
                    break
                assert offset == 1
                await asyncio.sleep(0.02)
            # What keys counted against the limit is given back with them, to the byte.
            while hot.bytes != sum(member.bytes for member in hot.partitions):
                await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_a_request_past_a_limit_is_refused_alone(settings: Settings) -> None:
    async def scenario() -> None:
        async with opened(replace(settings, max_partitions=2)) as hot:
            answers = await asyncio.gather(
                append(hot, "t", segment([b"a"], 0)),
                append(hot, "t", segment([b"b"], 1), segment([b"c"], 2)),
                append(hot, "t", segment([b"d"], 1)),
                return_exceptions=True,
            )
            assert answers[0] == [[1]] and answers[2] == [[1]]
            assert isinstance(answers[1], ZombiError)
            assert answers[1].code == "TOO_MANY_PARTITIONS"

    asyncio.run(scenario())


def test_a_second_opener_is_told_who_is_in_the_way(settings: Settings) -> None:
    async def scenario() -> None:
        async with opened(settings):
            with pytest.raises(StartupError, match="in use by another gateway"):
                HotBuffer(settings)

    asyncio.run(scenario())
