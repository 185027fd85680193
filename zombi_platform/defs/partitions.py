"""How assets are partitioned: by table, and by table and UTC hour."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

HOURS_SHOWN: Final = 30 * 24
"""Dagster slows down past some 100,000 partitions of an asset: 140 tables of 30 days."""

TABLES: Final = dg.DynamicPartitionsDefinition(name="tables")
"""Tables as the gateway knows them; the sensor adds what is new."""

_FORMAT: Final = "%Y-%m-%d-%H:%M"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def table_hours(now: datetime) -> dg.MultiPartitionsDefinition:
    """Tables and the hours up to now; the first one rolls on whenever the code is loaded."""
    start = (now - timedelta(hours=HOURS_SHOWN)).replace(hour=0, minute=0)
    hours = dg.HourlyPartitionsDefinition(start_date=start.strftime(_FORMAT), end_offset=1)
    return dg.MultiPartitionsDefinition({"table": TABLES, "hour": hours})


def hour_of(key: str) -> int:
    """Hours since 1970 of a partition key."""
    moment = datetime.strptime(key, _FORMAT).replace(tzinfo=UTC)
    return int((moment - _EPOCH) / timedelta(hours=1))


def hour_key(hour: int) -> str:
    return (_EPOCH + timedelta(hours=hour)).strftime(_FORMAT)


def table_hour(table: str, hour: int) -> dg.MultiPartitionKey:
    return dg.MultiPartitionKey({"table": table, "hour": hour_key(hour)})


def is_shown(hour: int, now: datetime) -> bool:
    """Whether an hour is on the grid; events may be older than that, or from the future."""
    last = int((now - _EPOCH) / timedelta(hours=1))
    return last - HOURS_SHOWN <= hour <= last
