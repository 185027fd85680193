"""The staging process: what it refuses, and that it goes on after it."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zombi_platform.catalog.live.messages import Publish, Published, Stage, line
from zombi_platform.catalog.live.process import StagerDiedError, StagingProcess, receive
from zombi_platform.cuts import Range
from zombi_platform.errors import NotFoundError, ZombiError
from zombi_platform.events import COLUMNS
from zombi_platform.lake.columns import FILE_SCHEMA
from zombi_platform.lake.storage import Storage


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StagingProcess]:
    started = StagingProcess(Storage(f"file://{tmp_path}"))
    yield started
    started.close()


def rows(first: int, last: int, partition: int = 0) -> pa.RecordBatch:
    count = last - first + 1
    columns = {
        "sequence": list(range(first, last + 1)),
        "partition": [partition] * count,
        "payload": [b"x"] * count,
        "timestamp_ms": [3_600_000 * 25 + n for n in range(count)],
        "idempotency_key": [None] * count,
        "headers": [None] * count,
    }
    return pa.RecordBatch.from_pydict(columns, schema=COLUMNS)


def stage(tmp_path: Path, *ranges: Range) -> Stage:
    return Stage("orders", f"file://{tmp_path}/block.parquet", ranges)


def test_a_block_has_the_columns_of_a_data_file(process: StagingProcess, tmp_path: Path) -> None:
    request = stage(tmp_path, Range(0, 5, 9), Range(7, 1, 2))
    process.stage(request, [rows(5, 6), rows(7, 9), rows(1, 2, partition=7)])
    found = pq.read_table(tmp_path / "block.parquet")
    assert found.schema.names == FILE_SCHEMA.names
    assert found["sequence"].to_pylist() == [5, 6, 7, 8, 9, 1, 2]
    assert set(found["event_hour"].to_pylist()) == {1}
    assert str(found["event_date"][0]) == "1970-01-02"


@pytest.mark.parametrize(
    "sent",
    [[rows(1, 2)], [rows(1, 2), rows(4, 4)], [rows(1, 4)], [rows(1, 3, partition=1)], []],
    ids=["short", "gap", "long", "other partition", "nothing"],
)
def test_rows_that_are_not_the_ranges_are_refused(
    process: StagingProcess, tmp_path: Path, sent: list[pa.RecordBatch]
) -> None:
    request = stage(tmp_path, Range(0, 1, 3))
    with pytest.raises(ZombiError, match="rows of a live block"):
        process.stage(request, sent)
    assert not (tmp_path / "block.parquet").exists()
    process.stage(request, [rows(1, 3)])


def test_a_source_that_fails_midway_leaves_the_process_usable(
    process: StagingProcess, tmp_path: Path
) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield rows(1, 2)
        raise NotFoundError("cleaned meanwhile")

    request = stage(tmp_path, Range(0, 1, 3))
    with pytest.raises(NotFoundError, match="cleaned meanwhile"):
        process.stage(request, failing())
    assert not (tmp_path / "block.parquet").exists()
    process.stage(request, [rows(1, 3)])


def test_blocks_of_an_earlier_process_are_not_known(
    process: StagingProcess, tmp_path: Path
) -> None:
    request = Publish("orders", "file:///base", "tag", f"file://{tmp_path}", "n", 1, ("block",))
    with pytest.raises(StagerDiedError):
        process.publish(request)


def test_a_source_that_breaks_does_not_leave_its_answer_to_the_next(
    process: StagingProcess, tmp_path: Path
) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield rows(1, 2)
        raise RuntimeError("not foreseen")

    request = stage(tmp_path, Range(0, 1, 3))
    with pytest.raises(RuntimeError, match="not foreseen"):
        process.stage(request, broken())
    process.stage(request, [rows(1, 3)])
    assert pq.read_table(tmp_path / "block.parquet").num_rows == 3


def test_half_an_answer_is_none() -> None:
    whole = line(Published("file:///m", (), 10))
    assert receive(BytesIO(whole + b"0123456789"))[1] == b"0123456789"
    with pytest.raises(EOFError):
        receive(BytesIO(whole + b"012345"))
