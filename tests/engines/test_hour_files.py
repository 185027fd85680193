"""Batches of a split become Parquet files; judged by pyarrow and DuckDB, not by the writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zombi_platform.cuts import Range, Split
from zombi_platform.engines import hour_files
from zombi_platform.engines.hour_files import HourRows, arrange, check_footer, write_parquet
from zombi_platform.errors import CorruptionError
from zombi_platform.events import COLUMNS, PARTITION_MAX, TIMESTAMP_MS_MAX

HOUR_MS = 3_600_000
NOON = 1_700_000_000_000 // HOUR_MS * HOUR_MS


def batch(
    stamps: Sequence[int],
    *,
    partition: int = 0,
    first: int = 1,
    payloads: Sequence[bytes] | None = None,
    keys: Sequence[str | None] | None = None,
    headers: Sequence[dict[str, str] | None] | None = None,
) -> pa.RecordBatch:
    count = len(stamps)
    columns = [
        np.arange(first, first + count),
        np.full(count, partition),
        payloads or [b"%d" % number for number in range(first, first + count)],
        stamps,
        keys or [None] * count,
        [None if one is None else list(one.items()) for one in headers or [None] * count],
    ]
    arrays = [pa.array(c, field.type) for c, field in zip(columns, COLUMNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)


def split_of(*ranges: Range) -> Split:
    return Split(number=3, ranges=ranges, bytes=0)


def write(hour: HourRows, directory: Path) -> Path:
    path = directory / f"{hour.hour}-{hour.partition}.parquet"
    with pa.OSFile(str(path), "wb") as sink:
        write_parquet("orders", hour, sink)
    check_footer(hour, pq.read_metadata(path))
    return path


def write_all(split: Split, batches: Sequence[pa.RecordBatch], directory: Path) -> list[Path]:
    return [write(hour, directory) for hour in arrange(split, batches)]


def query(text: str, path: Path) -> list[Any]:
    with duckdb.connect() as connection:
        return connection.execute(text, [str(path)]).fetchall()


def test_a_file_holds_one_hour_of_one_partition_sorted_by_time_then_sequence(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(7)
    stamps = (NOON + rng.integers(0, 3 * HOUR_MS, 5000) // 1000 * 1000).tolist()
    batches = [batch(stamps[:2000]), batch(stamps[2000:], first=2001)]
    paths = write_all(split_of(Range(0, 1, 5000)), batches, tmp_path)
    assert len(paths) == 3
    seen = []
    for path in paths:
        rows = query(
            "select timestamp_ms, sequence, payload, event_hour, event_date::varchar, topic, "
            "partition from read_parquet(?)",
            path,
        )
        assert rows == sorted(rows)
        assert len({stamp // HOUR_MS for stamp, *_ in rows}) == 1
        stamp = np.datetime64(rows[0][0], "ms")
        assert {row[3:] for row in rows} == {
            (stamp.astype(object).hour, str(stamp.astype("M8[D]")), "orders", 0)
        }
        seen += [(sequence, stamp, payload) for stamp, sequence, payload, *_ in rows]
    expected = [(n, stamp, b"%d" % n) for n, stamp in enumerate(stamps, 1)]
    assert sorted(seen) == expected


def test_rows_that_came_in_order_are_not_moved() -> None:
    stamps = [NOON, NOON, NOON + 5, NOON + HOUR_MS]
    first, second = arrange(split_of(Range(0, 1, 4)), [batch(stamps)])
    assert (first.order, second.order) == (slice(0, 3), slice(3, 4))
    assert first.take(0, 3)["payload"].chunk(0).buffers()[2].address == (
        second.take(0, 1)["payload"].chunk(0).buffers()[2].address
    )


def test_ranges_of_several_partitions_share_batches_or_not(tmp_path: Path) -> None:
    split = split_of(Range(4, 11, 13), Range(9, 1, 2), Range(PARTITION_MAX, 7, 7))
    parts = [
        batch([NOON] * 3, partition=4, first=11),
        batch([NOON] * 2, partition=9),
        batch([NOON], partition=PARTITION_MAX, first=7),
    ]
    joined = pa.Table.from_batches(parts).combine_chunks().to_batches()
    for batches in (parts, joined, [one.slice(n, 1) for one in joined for n in range(6)]):
        hours = arrange(split, batches)
        assert [(hour.partition, hour.sequences) for hour in hours] == [
            (4, (11, 13)),
            (9, (1, 2)),
            (PARTITION_MAX, (7, 7)),
        ]
    path = write(hours[2], tmp_path)
    assert query("select partition, sequence from read_parquet(?)", path) == [(PARTITION_MAX, 7)]


@pytest.mark.parametrize(
    ("stamp", "date", "hour"),
    [
        (0, "1970-01-01", 0),
        (HOUR_MS - 1, "1970-01-01", 0),
        (86_400_000 - 1, "1970-01-01", 23),
        (86_400_000, "1970-01-02", 0),
        (NOON - 365 * 86_400_000, "2022-11-14", 22),
        (NOON + 365 * 86_400_000, "2024-11-13", 22),
        (TIMESTAMP_MS_MAX, "9999-12-31", 23),
    ],
)
def test_every_time_lands_in_its_hour(stamp: int, date: str, hour: int, tmp_path: Path) -> None:
    [path] = write_all(split_of(Range(0, 1, 1)), [batch([stamp])], tmp_path)
    found = query("select event_date::varchar, event_hour from read_parquet(?)", path)
    assert found == [(date, hour)]


def test_payloads_keys_and_headers_come_back_byte_for_byte(tmp_path: Path) -> None:
    payloads = [b"", b"\x00\xff", bytes(20 * 2**20), b"{}"]
    keys = [None, "k", "ключ", ""]
    headers = [None, {"trace": "1", "src": ""}, {"trace": "2"}, None]
    rows = batch(
        [NOON + 3, NOON + 2, NOON + 1, NOON], payloads=payloads, keys=keys, headers=headers
    )
    [path] = write_all(split_of(Range(0, 1, 4)), [rows], tmp_path)
    table = pq.read_table(path)
    assert table["payload"].to_pylist() == payloads[::-1]
    assert table["idempotency_key"].to_pylist() == keys[::-1]
    assert [one and dict(one) for one in table["headers"].to_pylist()] == headers[::-1]


def test_the_footer_tells_what_iceberg_needs(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(1000)]
    [path] = write_all(
        split_of(Range(0, 1, 1000)), [batch(range(NOON, NOON + 1000), keys=keys)], tmp_path
    )
    ids = query("select name, field_id from parquet_schema(?) where field_id is not null", path)
    assert [number for _, number in ids] == list(range(1, 12))
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert all(column.statistics is not None for column in columns)
    assert all(column.statistics.has_min_max for column in columns[:8])
    assert all(column.has_column_index and column.has_offset_index for column in columns)
    assert [one.column_index for one in group.sorting_columns] == [4, 0]


def test_keys_have_a_bloom_filter_and_their_absence_costs_none(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(1000)]
    split = split_of(Range(0, 1, 1000))
    probe = "select bool_and(bloom_filter_excludes) from parquet_bloom_probe(?, 'idempotency_key', "
    [path] = write_all(split, [batch([NOON] * 1000, keys=keys)], tmp_path)
    assert query(probe + "'key-7')", path) == [(False,)]
    assert query(probe + "'no such key')", path) == [(True,)]
    [path] = write_all(split, [batch([NOON] * 1000)], tmp_path)
    offsets = "select distinct bloom_filter_offset from parquet_metadata(?)"
    assert query(offsets, path) == [(None,)]


def test_row_groups_are_bounded_by_rows_and_bytes(tmp_path: Path) -> None:
    count = hour_files.ROW_GROUP_EVENTS + 5
    [path] = write_all(split_of(Range(0, 1, count)), [batch([NOON] * count)], tmp_path)
    footer = pq.read_metadata(path)
    assert [footer.row_group(n).num_rows for n in range(footer.num_row_groups)] == [count - 5, 5]
    large = [bytes(hour_files.ROW_GROUP_BYTES // 2)] * 3
    rows = batch([NOON + 2, NOON + 1, NOON], payloads=large)
    [path] = write_all(split_of(Range(0, 1, 3)), [rows], tmp_path)
    footer = pq.read_metadata(path)
    assert all(footer.row_group(n).num_rows < 3 for n in range(footer.num_row_groups))
    assert query("select sequence from read_parquet(?)", path) == [(3,), (2,), (1,)]


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([batch([NOON] * 4)], "ends 1 events before"),
        ([batch([NOON] * 6)], "goes on after"),
        ([batch([NOON] * 5), batch([NOON], first=6)], "goes on after"),
        ([batch([NOON] * 5, first=2)], "one by one"),
        ([batch([NOON] * 3), batch([NOON] * 2, first=5)], "one by one"),
        ([batch([NOON] * 3), batch([NOON] * 2, first=3)], "one by one"),
        ([batch([NOON] * 5, partition=1)], "other partitions"),
        ([], "ends 5 events before"),
    ],
)
def test_rows_that_are_not_exactly_the_split_are_refused(
    batches: list[pa.RecordBatch], reason: str
) -> None:
    with pytest.raises(CorruptionError, match=reason):
        arrange(split_of(Range(0, 1, 5)), batches)


def test_a_footer_that_tells_of_other_events_is_refused(tmp_path: Path) -> None:
    split = split_of(Range(0, 1, 3))
    [written] = arrange(split, [batch([NOON, NOON + 1, NOON + 2])])
    footer = pq.read_metadata(write(written, tmp_path))
    for other in (
        arrange(split_of(Range(0, 1, 4)), [batch([NOON] * 4)]),
        arrange(split_of(Range(0, 2, 4)), [batch([NOON] * 3, first=2)]),
        arrange(split, [batch([NOON + HOUR_MS] * 3)]),
    ):
        with pytest.raises(CorruptionError, match="were written"):
            check_footer(other[0], footer)
