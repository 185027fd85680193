"""What a sweep may delete: files of its own table that nothing refers to, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lake.staging import stage
from tests.lake.worlds import put, rows
from zombi_platform.cuts import Range
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(Settings(data_dir=tmp_path))


def everything(lake: Lake) -> list[str]:
    return sorted(file.location for file in lake.storage.files(f"{lake.storage.warehouse}/"))


def test_a_tombstone_outside_the_table_deletes_nothing(lake: Lake) -> None:
    theirs = stage(lake.storage, "clicks", 1, Range(0, 1, 3))
    for cut in (stage(lake.storage, "orders", 1, Range(0, 1, 3)), theirs):
        put(lake, cut)
    before = everything(lake)
    home, path = lake.storage.table_location("orders"), theirs.files[0].path
    sideways = path.replace("/clicks/", "/orders/../clicks/")
    swept = lake.sweep(
        "orders",
        [path, sideways],
        [
            f"{lake.storage.warehouse}/",
            lake.storage.table_location("clicks"),
            home.removesuffix("rs"),
            f"{home}/../",
        ],
    )
    assert swept.deleted == ()
    assert everything(lake) == before


def test_nothing_is_swept_before_the_first_commit(lake: Lake) -> None:
    """The table may have been made again in the place of one that somebody wants back."""
    lake.ensure_table("orders")
    home = lake.storage.table_location("orders")
    places = [f"{home}/data/stray.parquet", f"{home}/metadata/v2.metadata.json.0f.tmp"]
    for place in places:
        lake.storage.write(place, b"")
    swept = lake.sweep("orders", places[:1], [f"{home}/metadata/v2.metadata.json."])
    assert (swept.deleted, swept.waiting) == ((), tuple(places))
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3)))
    assert set(lake.sweep("orders", swept.waiting).deleted) == set(places)


@pytest.mark.parametrize("odd", ["/orders//data/", "/orders/./data/"])
def test_another_spelling_of_a_file_in_use_does_not_delete_it(lake: Lake, odd: str) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    put(lake, cut)
    swept = lake.sweep("orders", [cut.files[0].path.replace("/orders/data/", odd)])
    assert swept.deleted == ()
    assert len(rows(lake)) == 3


def test_a_data_file_in_use_is_kept_wherever_its_writer_put_it(lake: Lake) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 3))
    elsewhere = cut.files[0].path.replace("/data/", "/files/")
    lake.storage.write(elsewhere, lake.storage.read(cut.files[0].path))
    put(lake, replace(cut, files=(replace(cut.files[0], path=elsewhere),)))
    assert lake.sweep("orders", [elsewhere]).kept == (elsewhere,)
    assert len(rows(lake)) == 3


@pytest.mark.parametrize("name", ["data/a\0b", "data", "data/", "metadata/v1.metadata.json/x"])
def test_a_name_that_no_file_can_have_does_not_stop_the_sweep(lake: Lake, name: str) -> None:
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3)))
    home = lake.storage.table_location("orders")
    lake.storage.write(f"{home}/data/stray", b"")
    lake.sweep("orders", [f"{home}/{name}", f"{home}/data/stray"])
    assert not lake.storage.exists(f"{home}/data/stray")
    assert len(rows(lake)) == 3
