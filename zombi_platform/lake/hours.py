"""What one hour of a table holds, as a reader of the lake sees it. Memory is one batch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa

from zombi_platform.lake.catalogs import catalog_errors
from zombi_platform.lake.lake import Lake

SAMPLE_ROWS: Final = 5
SAMPLE_COLUMNS: Final = ("partition", "sequence", "timestamp_ms", "idempotency_key", "payload")


@dataclass(frozen=True, slots=True)
class Hour:
    """Rows that were read, and the files they came from."""

    events: int
    bytes: int
    files: int
    sample: pa.Table
    snapshot_id: int | None


def read_hour(lake: Lake, table: str, hour: int) -> Hour:
    """Read an hour, counted from 1970; a table that is not there holds nothing."""
    found = lake.load(table)
    if found is None:
        return Hour(0, 0, 0, pa.table({}), None)
    loaded, state = found
    moment = datetime.fromtimestamp(0, UTC) + timedelta(hours=hour)
    here = f"event_date = '{moment.date()}' and event_hour = {moment.hour}"
    with catalog_errors(table):
        files = [task.file for task in loaded.scan(here).plan_files()]
        counted = loaded.scan(here, selected_fields=("sequence",)).to_arrow_batch_reader()
        sample = loaded.scan(here, selected_fields=SAMPLE_COLUMNS, limit=SAMPLE_ROWS).to_arrow()
        return Hour(
            events=sum(batch.num_rows for batch in counted),
            bytes=sum(file.file_size_in_bytes for file in files),
            files=len(files),
            sample=sample.select(SAMPLE_COLUMNS),
            snapshot_id=state.snapshot_id,
        )
