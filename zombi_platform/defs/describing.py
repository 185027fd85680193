"""What the steps of a flush did, as metadata that Dagster plots and shows. Pure functions.

Numbers keep their names over time, so that a plot of an asset is a history of its table.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg
import pyarrow as pa

from zombi_platform.cuts import Cut, StagedFile
from zombi_platform.defs.partitions import hour_key
from zombi_platform.lake.state import LakeState
from zombi_platform.pipeline import Cleaned, Committed, Merged, Staged
from zombi_platform.progress import TableProgress

Metadata = dict[str, Any]

ROWS_SHOWN_MAX: Final = 200
CELL_CHARS_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class HourSum:
    """What one commit brought to an hour."""

    hour: int
    events: int
    bytes: int
    files: int


def sum_hours(files: Iterable[StagedFile]) -> list[HourSum]:
    """Sums by hour, in their order."""
    found: dict[int, list[StagedFile]] = defaultdict(list)
    for file in files:
        found[file.hour].append(file)
    return [
        HourSum(
            hour,
            sum(file.events for file in members),
            sum(file.bytes for file in members),
            len(members),
        )
        for hour, members in sorted(found.items())
    ]


def describe_depth(progress: TableProgress) -> Metadata:
    return {
        "events": progress.events,
        "bytes": progress.bytes,
        "unflushed_events": progress.unflushed_events,
        "unflushed_bytes": progress.unflushed_bytes,
        "lag_secs": round(progress.lag_secs, 1),
        "oldest_age_secs": round(progress.oldest_age_secs or 0.0, 1),
        "cuts": len(progress.cuts),
    }


def describe_cut(cut: Cut) -> Metadata:
    return {
        "events": cut.events,
        "bytes": cut.bytes,
        "splits": len(cut.splits),
        "partitions": len(cut.ranges),
        "cut": cut.id,
        "lag_secs": round(max(0.0, time.time() - cut.oldest_ms / 1000), 1),
        "ranges": _table(
            [
                {"partition": part.partition, "first": part.first, "last": part.last}
                for part in cut.ranges
            ]
        ),
    }


def describe_staged(staged: Staged, engine: str) -> Metadata:
    files = staged.cut.files
    return {
        "events": staged.cut.events,
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "seconds": round(staged.seconds, 3),
        "engine": engine,
        "cut": staged.cut.id,
        "hours": describe_hours(sum_hours(files)),
    }


def describe_commit(committed: Committed, state: LakeState) -> Metadata:
    files = [file for cut in committed.cuts for file in cut.files]
    oldest_ms = min(cut.oldest_ms for cut in committed.cuts)
    return {
        "events": committed.events,
        "dagster/partition_row_count": committed.events,
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "seconds": round(committed.seconds, 3),
        "lag_secs": round(max(0.0, time.time() - oldest_ms / 1000), 1),
        "cuts": " ".join(str(cut.id) for cut in committed.cuts),
        "snapshot_id": dg.MetadataValue.text(str(committed.commit.snapshot_id)),
        "metadata_location": dg.MetadataValue.path(state.metadata_location),
        "hours": describe_hours(sum_hours(files)),
    }


def describe_cleaned(cleaned: Cleaned) -> Metadata:
    return {
        "deleted_events": cleaned.deleted_events,
        "remaining_events": cleaned.remaining_events,
        "deleted_files": cleaned.deleted_files,
    }


def describe_merged(merged: Merged | None, engine: str) -> Metadata:
    if merged is None:
        return {"files_before": 0, "files_after": 0, "engine": engine}
    return {
        "files_before": merged.replacement.files_before,
        "files_after": merged.replacement.files_after,
        "events": merged.replacement.events,
        "bytes": merged.replacement.bytes,
        "seconds": round(merged.seconds, 3),
        "engine": engine,
        "snapshot_id": dg.MetadataValue.text(str(merged.replacement.snapshot_id)),
    }


def describe_hours(hours: Sequence[HourSum]) -> dg.TableMetadataValue:
    return _table(
        [
            {"hour": hour_key(h.hour), "events": h.events, "bytes": h.bytes, "files": h.files}
            for h in hours
        ]
    )


def describe_sample(sample: pa.Table) -> dg.TableMetadataValue:
    """A few rows as a table; long cells are cut."""
    rows = [{name: _cell(value) for name, value in row.items()} for row in sample.to_pylist()]
    return _table(rows)


def _cell(value: object) -> str | int | None:
    if value is None or isinstance(value, int):
        return value
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _table(rows: Sequence[Mapping[str, str | int | None]]) -> dg.TableMetadataValue:
    names = list(rows[0]) if rows else ["nothing"]
    columns = [
        dg.TableColumn(name, "int" if rows and isinstance(rows[0][name], int) else "string")
        for name in names
    ]
    return dg.TableMetadataValue(
        records=[dg.TableRecord(dict(row)) for row in rows[:ROWS_SHOWN_MAX]],
        schema=dg.TableSchema(columns=columns),
    )
