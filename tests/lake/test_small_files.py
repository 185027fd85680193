"""Which files are merged: a pure choice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zombi_platform.lake.small_files import (
    FILES_MAX,
    LiveFile,
    MergeLimits,
    base_of,
    choose,
    merge_name,
)
from zombi_platform.settings import Settings

LIMITS = MergeLimits(at=4, bytes_max=8_000_000, events_max=1000)


def files(count: int, size: int = 5_000, partition: int = 0, hour: int = 7) -> list[LiveFile]:
    return [
        LiveFile(f"{partition}/{hour}/{size}/{n}", partition, hour, 10, size) for n in range(count)
    ]


def test_enough_files_of_a_size_become_one() -> None:
    assert choose(files(3), LIMITS) == ()
    (group,) = choose(files(4), LIMITS)
    assert (group.partition, group.hour, len(group.files)) == (0, 7, 4)


def test_only_files_of_one_hour_partition_and_size_go_together() -> None:
    apart = [*files(3), *files(3, partition=1), *files(3, hour=8), *files(3, size=50_000)]
    assert choose(apart, LIMITS) == ()
    both = choose([*files(4, partition=1), *apart, *files(5, hour=9)], LIMITS)
    assert [(group.partition, group.hour, len(group.files)) for group in both] == [
        (1, 7, 7),
        (0, 9, 5),
    ]
    assert [group.number for group in both] == [0, 1]


def test_large_files_are_left_alone() -> None:
    assert choose(files(100, size=LIMITS.small_max), LIMITS) == ()
    assert choose(files(100, size=LIMITS.small_max - 1), LIMITS)


def test_no_file_gets_more_events_than_a_flush_gives_it() -> None:
    (group,) = choose([LiveFile(str(n), 0, 7, 300, 5_000) for n in range(9)], LIMITS)
    assert sum(file.events for file in group.files) == 900


def test_one_merge_is_bounded() -> None:
    many = [file for p in range(FILES_MAX // 4 + 5) for file in files(4, 100, partition=p)]
    assert len(choose(many, LIMITS)) == FILES_MAX // 4
    heavy = [file for p in range(50) for file in files(4, 240_000, partition=p)]
    assert len(choose(heavy, LIMITS)) == LIMITS.bytes_max // (4 * 240_000)


@pytest.mark.parametrize(("at", "limits_at"), [("10", 10), ("1", 2), ("0", None)])
def test_the_setting_turns_it_off(at: str, limits_at: int | None) -> None:
    limits = MergeLimits.of(Settings.from_env({"ZOMBI_MERGE_FILES_AT": at}))
    assert (None if limits is None else limits.at) == limits_at


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 2_000_000)), max_size=80
    )
)
def test_whatever_there_is_a_file_is_merged_once_and_merging_ends(
    found: list[tuple[int, int, int]],
) -> None:
    table = [LiveFile(str(n), p, h, 1, size) for n, (p, h, size) in enumerate(found)]
    for step in range(len(table) + 1):
        groups = choose(table, LIMITS)
        taken = Counter(file.path for group in groups for file in group.files)
        assert set(taken.values()) <= {1}
        assert all(len(group.files) > 1 for group in groups)
        if not groups:
            break
        table = [file for file in table if file.path not in taken] + [
            LiveFile(
                f"{step}-{group.number}",
                group.partition,
                group.hour,
                sum(file.events for file in group.files),
                sum(file.bytes for file in group.files),
            )
            for group in groups
        ]
    else:
        raise AssertionError("merging does not end")
    assert sum(file.events for file in table) == len(found)
    sizes = Counter((file.partition, file.hour, len(str(file.bytes))) for file in table)
    small = [n for (_, _, digits), n in sizes.items() if digits < len(str(LIMITS.small_max))]
    assert all(n < LIMITS.at for n in small)


def test_names_tell_the_snapshot_they_are_made_for() -> None:
    name = merge_name(4711)
    assert base_of(f"s3://b/t/data/partition=0/{name}1f-00ff.parquet") == 4711
    assert base_of(f"file:///w/t/metadata/snap-12-{name}5b6c-m0.avro") == 4711
    assert base_of(f"file:///w/t/metadata/{name}5b6c-m1.avro") == 4711
    assert base_of("file:///w/t/data/00000001-00002-1f-00ff-0.parquet") is None
    assert base_of(f"file:///w/{name}x/data/1.parquet") is None
