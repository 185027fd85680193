"""Cuts on a real RocksDB: ranges, splits, first words, tombstones, deletion, restarts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tests.test_hot_buffer import append, opened, rows, segment
from zombi_platform.cuts import Cut, CutState, Range, Split, StagedFile
from zombi_platform.errors import (
    ConflictError,
    FencedError,
    HotStorageError,
    InvalidRequestError,
    NotFoundError,
)
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.hot import HotBuffer
from zombi_platform.hot.splits import RANGES_MAX, SplitLimits
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

LIMITS = SplitLimits(2**20, 1_000_000)


@pytest.fixture(params=["fsync", "none"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, durability=request.param, delete_grace_secs=1000)


@asynccontextmanager
async def pipeline(settings: Settings) -> AsyncIterator[tuple[HotBuffer, Pipeline]]:
    async with opened(settings) as hot:
        view = LakeView(Lake(settings))
        yield hot, Pipeline(settings, hot, view)
        view.close()


async def open_cut(line: Pipeline, table: str, epoch: int, limits: SplitLimits = LIMITS) -> Cut:
    cut_id = await line.cuts.open(table, epoch, limits)
    assert cut_id is not None
    [cut] = await line.cuts.read(table, [cut_id])
    return cut


def files_of(split: Split, attempt: str = "a") -> list[StagedFile]:
    return [
        StagedFile(
            path=f"{attempt}-{split.number}-{part.partition}",
            split=split.number,
            partition=part.partition,
            hour=1,
            events=part.events,
            bytes=100,
            first=part.first,
            last=part.last,
        )
        for part in split.ranges
    ]


async def stage(line: Pipeline, cut: Cut, epoch: int, attempt: str = "a") -> None:
    for split in cut.splits:
        files = files_of(split, attempt)
        paths = [file.path for file in files]
        await line.cuts.intend(cut.table, epoch, cut.id, split.number, paths)
        reported = await line.cuts.report(cut.table, epoch, cut.id, split.number, files)
        assert reported.kept


def sequences(batches: Sequence[pa.RecordBatch]) -> list[tuple[int, int]]:
    found = pa.Table.from_batches(batches)
    return list(zip(found["partition"].to_pylist(), found["sequence"].to_pylist(), strict=True))


def test_a_cut_takes_everything_once_and_the_next_one_goes_on_after_it(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            assert await line.cuts.open("t", epoch, LIMITS) is None
            await append(hot, "t", segment([b"a", b"b"], 9), segment([b"c"], 10))
            first = await open_cut(line, "t", epoch)
            assert first.ranges == (Range(9, 1, 2), Range(10, 1, 1))
            await append(hot, "t", segment([b"d"], 9))
            assert await line.cuts.open("t", epoch, LIMITS) == first.id
            await stage(line, first, epoch)
            second = await open_cut(line, "t", epoch)
            assert second.ranges == (Range(9, 3, 3),)
            [split] = second.splits
            batches = list(line.cuts.read_split("t", second.id, split.number))
            assert sequences(batches) == [(9, 3)]
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", epoch)
            assert await open_cut(line, "t", epoch) == second
            assert line.cuts.of("t").held[first.id].state is CutState.STAGED
            await append(hot, "t", segment([b"e"], 10))
            await stage(line, second, epoch)
            third = await open_cut(line, "t", epoch)
            assert (third.id, third.ranges) == (3, (Range(10, 2, 2),))

    asyncio.run(scenario())


def test_splits_are_within_the_limits_and_hold_every_sequence(settings: Settings) -> None:
    limits = SplitLimits(64 * 1024, 700)

    async def scenario() -> None:
        async with pipeline(replace(settings, max_partitions=1000)) as (hot, line):
            for size in (10, 3000, 1, 40_000, 200):
                payloads = [b"x" * size] * (200_000 // size if size > 100 else 1500)
                await append(hot, "t", segment(payloads, 5))
            await append(hot, "t", *(segment([b"x"], 100 + i) for i in range(RANGES_MAX + 10)))
            await append(hot, "t", segment([b"y" * 200_000], 7))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch, limits)
            check_gapless(cut, hot)
            for split in cut.splits:
                assert split.events <= limits.events
                assert split.bytes <= limits.bytes or split.events == 1
                assert len(split.ranges) <= RANGES_MAX
                read = [
                    (part.partition, sequence)
                    for part in split.ranges
                    for sequence in range(part.first, part.last + 1)
                ]
                batches = list(line.cuts.read_split("t", cut.id, split.number))
                assert sequences(batches) == read
            small = [split for split in cut.splits if len(split.ranges) > 1]
            assert len(small) <= 4

    asyncio.run(scenario())


def test_pieces_of_one_block_that_share_a_split_are_one_range(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            # A block of several splits, whose pieces are estimated: two of them fit one split.
            await append(hot, "t", segment([b"x" * 300] * 9 + [b"y" * 7], 3))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch, SplitLimits(565, 1_000_000))
            check_gapless(cut, hot)
            assert all(len(split.ranges) == 1 for split in cut.splits)
            await stage(line, cut, epoch)
            assert line.cuts.of("t").held[cut.id].state is CutState.STAGED

    asyncio.run(scenario())


def check_gapless(cut: Cut, hot: HotBuffer) -> None:
    parts: dict[int, list[Range]] = {}
    for part in (part for split in cut.splits for part in split.ranges):
        parts.setdefault(part.partition, []).append(part)
    for whole in cut.ranges:
        member = hot.partitions.find(cut.table, whole.partition)
        assert member is not None and whole.last <= member.last
        found = parts.pop(whole.partition)
        assert (found[0].first, found[-1].last) == (whole.first, whole.last)
        assert all(a.last + 1 == b.first for a, b in itertools.pairwise(found))
    assert not parts


def test_merging_under_an_open_cut_changes_nothing_it_reads(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            for i in range(25):
                await append(hot, "t", segment([b"%d" % i]))
            cut = await open_cut(line, "t", epoch)
            for i in range(25, 50):
                await append(hot, "t", segment([b"%d" % i]))
            [member] = hot.partitions.known("t")
            while len(member.small) > 20:
                await asyncio.sleep(0.01)
            [batch] = line.cuts.read_split("t", cut.id, 0)
            assert batch["payload"].to_pylist() == [b"%d" % i for i in range(25)]

    asyncio.run(scenario())


def test_the_first_word_about_a_split_is_kept(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            await append(hot, "t", segment([b"a", b"b"], 0))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch)
            ours, theirs = files_of(cut.splits[0], "ours"), files_of(cut.splits[0], "theirs")
            with pytest.raises(ConflictError, match="not announced"):
                await line.cuts.report("t", epoch, cut.id, 0, ours)
            for files in (ours, theirs):
                await line.cuts.intend("t", epoch, cut.id, 0, [files[0].path])
            for _ in range(2):
                reported = await line.cuts.report("t", epoch, cut.id, 0, ours)
                assert (reported.kept, list(reported.files)) == (True, ours)
            for _ in range(2):
                reported = await line.cuts.report("t", epoch, cut.id, 0, theirs)
                assert (reported.kept, list(reported.files)) == (False, ours)
            # Announced again after it was recorded, a file of the cut gets no tombstone.
            await line.cuts.intend("t", epoch, cut.id, 0, [ours[0].path])
            await line.tombstones.add("t", epoch, [theirs[0].path], ["p/"], 0)
            assert (await line.tombstones.due("t", None, 10)).paths == ()

    asyncio.run(scenario())


def test_a_report_that_does_not_hold_the_split_is_refused(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            await append(hot, "t", segment([b"a", b"b", b"c"], 0), segment([b"d"], 1))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch)
            good, other = files_of(cut.splits[0])
            wrong = [
                [good],
                [good, other, replace(other, path="x")],
                [good, replace(other, partition=2)],
                [replace(good, last=4, events=4), other],
                [replace(good, events=2), other],
                [replace(good, split=1), other],
                [good, replace(other, path=good.path)],
                [replace(good, first=3), other],
            ]
            for files in wrong:
                await line.cuts.intend("t", epoch, cut.id, 0, [file.path for file in files])
                with pytest.raises(InvalidRequestError):
                    await line.cuts.report("t", epoch, cut.id, 0, files)
            for number in (1, 99):
                with pytest.raises(NotFoundError):
                    await line.cuts.report("t", epoch, cut.id, number, [good])
            await stage(line, cut, epoch)

    asyncio.run(scenario())


def test_a_stale_epoch_is_refused_everywhere(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            await append(hot, "t", segment([b"a"]))
            stale = await line.leases.take("t", "old", None)
            cut = await open_cut(line, "t", stale)
            await line.leases.release("t", stale)
            await line.leases.release("t", stale)
            epoch = await line.leases.take("t", "new", None)
            assert epoch == stale + 1
            for refused in (
                line.leases.take("t", "old", stale),
                line.leases.release("t", stale),
                line.cuts.open("t", stale, LIMITS),
                line.cuts.intend("t", stale, cut.id, 0, ["x"]),
                line.cuts.report("t", stale, cut.id, 0, files_of(cut.splits[0])),
                line.cuts.commit("t", stale, {cut.id: 1}),
                line.cuts.clean("t", stale, [cut.id]),
                line.tombstones.add("t", stale, ["x"], [], 0),
                line.tombstones.drop("t", stale, ["x"], []),
            ):
                with pytest.raises(FencedError):
                    await refused
            assert (await open_cut(line, "t", epoch)) == cut

    asyncio.run(scenario())


def test_committed_cuts_are_deleted_and_sequences_are_never_reused(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            await append(hot, "t", segment([b"a", b"b", b"c"]))
            cut = await open_cut(line, "t", epoch)
            with pytest.raises(ConflictError, match="not staged"):
                await line.cuts.commit("t", epoch, {cut.id: 7})
            await stage(line, cut, epoch)
            await append(hot, "t", segment([b"d"]))
            assert line.cuts.cleanable("t", 0) == ([], 0.0)
            for _ in range(2):
                await line.cuts.commit("t", epoch, {cut.id: 7})
            assert hot.watermarks("t")[0].flush_watermark == 3
            ids, wait = line.cuts.cleanable("t", 100)
            assert ids == [] and 0 < wait <= 100
            assert line.cuts.cleanable("t", 0) == ([cut.id], 0.0)
            assert await line.cuts.clean("t", epoch, [cut.id]) == 3
            assert await line.cuts.clean("t", epoch, [cut.id]) == 0
            assert rows(hot, "t", 0)["sequence"].to_pylist() == [4]
            with pytest.raises(NotFoundError):
                line.cuts.read_split("t", cut.id, 0)
        async with pipeline(settings) as (hot, line):
            assert rows(hot, "t", 0)["sequence"].to_pylist() == [4]
            assert await append(hot, "t", segment([b"e"])) == [[5]]
            await line.leases.take("t", "me", epoch)
            last = await open_cut(line, "t", epoch)
            assert (last.id, last.ranges) == (2, (Range(0, 4, 5),))
            await stage(line, last, epoch)
            await line.cuts.commit("t", epoch, {last.id: 8})
            assert await line.cuts.clean("t", epoch, [last.id]) == 2
        async with pipeline(settings) as (hot, line):
            assert await append(hot, "t", segment([b"f"])) == [[6]]

    asyncio.run(scenario())


def test_cuts_are_committed_in_their_order(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            cuts = []
            for payload in (b"a", b"b", b"c"):
                await append(hot, "t", segment([payload]))
                cuts.append(await open_cut(line, "t", epoch))
                await stage(line, cuts[-1], epoch, payload.decode())
            with pytest.raises(ConflictError, match="comes before"):
                await line.cuts.commit("t", epoch, {2: 1})
            await line.cuts.commit("t", epoch, {2: 1, 1: 1})
            await line.cuts.commit("t", epoch, {1: 1, 2: 1, 3: 2})
            assert [cut.state for cut in line.cuts.of("t").held.values()] == ["committed"] * 3
            assert [cut.snapshot_id for cut in line.cuts.of("t").held.values()] == [1, 1, 2]

    asyncio.run(scenario())


def test_tombstones_are_given_out_when_due_and_never_adopted_afterwards(
    settings: Settings,
) -> None:
    async def scenario() -> None:
        async with pipeline(replace(settings, delete_grace_secs=0)) as (hot, line):
            await append(hot, "t", segment([b"a"]))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch)
            files = files_of(cut.splits[0])
            await line.cuts.intend("t", epoch, cut.id, 0, [files[0].path])
            names = [f"f{i}" for i in range(5)]
            await line.tombstones.add("t", epoch, names, ["dir/"], 0)
            await line.tombstones.add("t", epoch, ["later"], [], 1000)
            await line.tombstones.add("t", epoch, ["f4"], [], 1000)
            found, after = [], None
            while True:
                page = await line.tombstones.due("t", after, 2)
                found += [*page.paths, *page.prefixes]
                after = page.next
                if after is None:
                    break
            assert sorted(found) == sorted([files[0].path, *names[:4], "dir/"])
            with pytest.raises(ConflictError) as caught:
                await line.cuts.report("t", epoch, cut.id, 0, files)
            assert caught.value.code == "INTENT_EXPIRED"
            for _ in range(2):
                await line.tombstones.drop("t", epoch, names, ["dir/"])
            assert (await line.tombstones.due("t", None, 10)).paths == (files[0].path,)

    asyncio.run(scenario())


def test_a_lease_ends_by_the_steady_clock_and_a_restart_gives_one_more_term(
    settings: Settings,
) -> None:
    async def scenario() -> None:
        quick = replace(settings, lease_secs=1)
        async with pipeline(quick) as (_, line):
            first = await line.leases.take("t", "a", None)
            with pytest.raises(ConflictError, match="leased to a") as caught:
                await line.leases.take("t", "b", None)
            assert caught.value.code == "LEASE_HELD"
            while line.leases.holding("t") is not None:
                await asyncio.sleep(0.05)
            assert await line.leases.take("t", "a", first) == first  # nobody came meanwhile
            while line.leases.holding("t") is not None:
                await asyncio.sleep(0.05)
            assert await line.leases.take("t", "b", None) == first + 1
        async with pipeline(replace(settings, lease_secs=1000)) as (_, line):
            with pytest.raises(ConflictError):
                await line.leases.take("t", "c", None)
            assert await line.leases.take("t", "b", first + 1) == first + 1

    asyncio.run(scenario())


def test_no_sequence_is_skipped_by_cuts_under_concurrent_writers(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            acked: dict[int, int] = {}

            async def write(partition: int) -> None:
                for _ in range(100):
                    [offsets] = await append(hot, "t", segment([b"x"] * 50, partition))
                    acked[partition] = max(acked.get(partition, 0), offsets[-1])

            async def cut_and_clean() -> int:
                before = dict(acked)
                cut_id = await line.cuts.open("t", epoch, SplitLimits(2**20, 5000))
                if cut_id is None:
                    assert before == taken
                    return 0
                [cut] = await line.cuts.read("t", [cut_id])
                check_gapless(cut, hot)
                for part in cut.ranges:
                    assert part.first == taken.get(part.partition, 0) + 1
                    taken[part.partition] = part.last
                # Whatever was acked before the cut was opened is in it or in one before it.
                assert all(taken[partition] >= last for partition, last in before.items())
                for split in cut.splits:
                    events = sum(
                        b.num_rows for b in line.cuts.read_split("t", cut.id, split.number)
                    )
                    assert events == split.events
                await stage(line, cut, epoch, f"{cut.id}")
                await line.cuts.commit("t", epoch, {cut.id: cut.id})
                await line.cuts.clean("t", epoch, [cut.id])
                return cut.events

            taken: dict[int, int] = {}
            writers = [asyncio.create_task(write(n % 4)) for n in range(16)]
            cut_events = 0
            while not all(writer.done() for writer in writers):
                cut_events += await cut_and_clean()
                await asyncio.sleep(0)
            await asyncio.gather(*writers)
            cut_events += await cut_and_clean()
            assert taken == acked and cut_events == sum(acked.values())
            assert rows(hot, "t").num_rows == 0

    asyncio.run(scenario())


def test_thousands_of_small_partitions_are_few_splits(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(replace(settings, max_partitions=4096)) as (hot, line):
            await append(hot, "t", *(segment([b"x"], n) for n in range(4096)))
            epoch = await line.leases.take("t", "me", None)
            cut = await open_cut(line, "t", epoch)
            check_gapless(cut, hot)
            assert len(cut.splits) == 4096 // RANGES_MAX
            await stage(line, cut, epoch)
            listed = msgspec.json.decode(b"".join(line.cuts.json("t")), type=list[Cut])
            assert len(listed[0].files) == 4096 and listed[0].missing == ()
            await line.cuts.commit("t", epoch, {cut.id: 1})
            assert await line.cuts.clean("t", epoch, [cut.id]) == 4096
            assert hot.bytes == 0

    asyncio.run(scenario())


def test_a_reader_under_way_is_not_disturbed_by_a_deletion(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            await append(hot, "t", segment([b"x" * 1000] * 9000))
            cut = await open_cut(line, "t", epoch)
            splits = line.cuts.read_split("t", cut.id, 0)
            reading = hot.reading("t", 0, 0, 9000, None).batches
            events = next(reading).num_rows
            await stage(line, cut, epoch)
            await line.cuts.commit("t", epoch, {cut.id: 1})
            await line.cuts.clean("t", epoch, [cut.id])
            await append(hot, "t", segment([b"new"]))
            assert events + sum(batch.num_rows for batch in reading) == 9000
            assert sum(batch.num_rows for batch in splits) == cut.splits[0].events
            assert rows(hot, "t", 0)["sequence"].to_pylist() == [9001]

    asyncio.run(scenario())


def test_readers_never_miss_an_event_between_deletion_and_arrival(settings: Settings) -> None:
    """Reads race with cuts, cleaning and writing: each sees a run without a gap."""

    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            writing = True
            seen = 0

            def read() -> None:
                nonlocal seen
                while writing:
                    found = rows(hot, "t", 0)["sequence"].to_pylist()
                    assert found == list(range(found[0], found[0] + len(found))) if found else True
                    seen += len(found)

            await append(hot, "t", segment([b"x"] * 20))
            reader = asyncio.create_task(asyncio.to_thread(read))
            for _ in range(60):
                await append(hot, "t", segment([b"x"] * 20))
                cut = await open_cut(line, "t", epoch)
                await append(hot, "t", segment([b"x"] * 20))
                await stage(line, cut, epoch, f"{cut.id}")
                await line.cuts.commit("t", epoch, {cut.id: cut.id})
                await line.cuts.clean("t", epoch, [cut.id])
            writing = False
            await reader
            assert seen

    asyncio.run(scenario())


def test_all_is_known_again_after_the_database_was_reopened(settings: Settings) -> None:
    async def scenario() -> None:
        async with pipeline(settings) as (hot, line):
            epoch = await line.leases.take("t", "me", None)
            await append(hot, "t", segment([b"a", b"b"]))
            first = await open_cut(line, "t", epoch)
            await stage(line, first, epoch)
            await append(hot, "t", segment([b"c"]))
            second = await open_cut(line, "t", epoch)
            await line.notes.request_flush("t", {0: 3})
            before = line.progress("t", 0)
            with pytest.raises(HotStorageError, match="interrupted"):
                async with hot.changing():
                    raise RuntimeError("as if the disk had refused")
            with pytest.raises(HotStorageError):
                await line.cuts.open("t", epoch, LIMITS)
            while hot.failure is not None:
                await asyncio.sleep(0.02)
            after = line.progress("t", 0)
            assert after.watermarks == before.watermarks and after.requested
            assert [(c.id, c.state, c.files) for c in after.cuts] == [
                (1, "staged", 1),
                (2, "open", 0),
            ]
            assert (after.unflushed_events, after.unflushed_bytes) == (0, 0)
            await append(hot, "t", segment([b"d"]))
            assert await open_cut(line, "t", epoch) == second
            await stage(line, second, epoch)
            assert (await open_cut(line, "t", epoch)).ranges == (Range(0, 4, 4),)

    asyncio.run(scenario())
