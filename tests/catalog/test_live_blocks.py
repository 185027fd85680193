"""Which blocks a live snapshot needs: every sequence past the watermarks once, whatever came."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zombi_platform.catalog.live.blocks import (
    BLOCK_AGE_SECS_MAX,
    BLOCK_EVENTS_MAX,
    BLOCKS_MAX,
    Block,
    CoverError,
    Hot,
    check_cover,
    plan_blocks,
)
from zombi_platform.cuts import Range

PARTITIONS = 3


class Table:
    """A table that is written, cut, committed and read, without its rows."""

    def __init__(self) -> None:
        self.last = dict.fromkeys(range(PARTITIONS), 0)
        self.cuts = [dict(self.last)]
        self.watermarks: dict[int, int] = {}
        self.blocks: tuple[Block, ...] = ()
        self.staged_events = 0

    def write(self, partition: int, events: int) -> None:
        self.last[partition] += events

    def cut(self) -> None:
        self.cuts.append(dict(self.last))

    def commit(self, count: int) -> None:
        """Commit the oldest cuts."""
        for _ in range(min(count, len(self.cuts) - 1)):
            del self.cuts[0]
        self.watermarks = dict(self.cuts[0])

    def load(self, now: float = 0.0) -> None:
        hot = [Hot(p, last, self.cuts[-1][p], 200) for p, last in self.last.items()]
        plan = plan_blocks(self.blocks, self.watermarks, hot, now)
        staged = tuple(Block(str(ranges), ranges, now) for ranges in plan.missing)
        assert all(block.events <= BLOCK_EVENTS_MAX for block in staged)
        self.staged_events += sum(block.events for block in staged)
        self.blocks = plan.kept + staged
        check_cover(self.blocks, self.watermarks, self.last)


step = st.one_of(
    st.tuples(st.just("write"), st.integers(0, PARTITIONS - 1), st.integers(1, 400_000)),
    st.tuples(st.just("cut")),
    st.tuples(st.just("commit"), st.integers(1, 3)),
    st.tuples(st.just("load")),
)


@given(st.lists(step, max_size=60))
def test_whatever_happens_each_load_covers_every_sequence_once(
    steps: list[tuple[str, int]],
) -> None:
    table = Table()
    for name, *arguments in steps:
        getattr(table, name)(*arguments)
    table.load()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 500), min_size=200, max_size=300))
def test_blocks_stay_few_and_events_are_seldom_staged_again(writes: list[int]) -> None:
    table = Table()
    for events in writes:
        table.write(0, events)
        table.load()
        assert len(table.blocks) <= BLOCKS_MAX
    assert table.staged_events < 8 * sum(writes)


def test_an_unchanged_table_needs_nothing_new() -> None:
    table = Table()
    table.write(0, 10)
    table.load()
    before, staged = table.blocks, table.staged_events
    table.load()
    assert (table.blocks, table.staged_events) == (before, staged)


def test_blocks_end_where_cuts_end_so_a_commit_leaves_the_rest() -> None:
    table = Table()
    table.write(0, 10)
    table.cut()
    table.write(0, 5)
    table.load()
    table.commit(1)
    staged = table.staged_events
    table.load()
    assert [block.ranges for block in table.blocks] == [(Range(0, 11, 15),)]
    assert table.staged_events == staged


def test_a_watermark_inside_a_block_costs_the_block_but_no_row() -> None:
    table = Table()
    table.write(0, 10)
    table.load()
    table.watermarks = {0: 4}
    table.load()
    assert [block.ranges for block in table.blocks] == [(Range(0, 5, 10),)]


def test_a_block_is_not_used_past_its_age() -> None:
    table = Table()
    table.write(0, 10)
    table.load()
    table.load(now=BLOCK_AGE_SECS_MAX + 1)
    assert [block.staged_at for block in table.blocks] == [BLOCK_AGE_SECS_MAX + 1]


def test_sequences_that_the_hot_buffer_took_back_are_not_shown() -> None:
    table = Table()
    table.write(0, 10)
    table.load()
    table.last[0] = 7
    table.load()
    assert [block.ranges for block in table.blocks] == [(Range(0, 1, 7),)]


@pytest.mark.parametrize(
    "ranges",
    [[Range(0, 2, 5)], [Range(0, 1, 3), Range(0, 3, 5)], [Range(0, 1, 4)]],
    ids=["gap", "overlap", "short"],
)
def test_gaps_and_overlaps_are_noticed(ranges: list[Range]) -> None:
    blocks = [Block(str(part), (part,), 0.0) for part in ranges]
    with pytest.raises(CoverError):
        check_cover(blocks, {}, {0: 5})
