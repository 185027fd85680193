"""What runs by the clock."""

from __future__ import annotations

import dagster as dg

from zombi_platform.defs.flush_all import flush_all

daily_flush = dg.ScheduleDefinition(
    name="daily_flush",
    job=flush_all,
    cron_schedule="17 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Once a day every table, also those too quiet for any threshold: brings the "
    "last events to Iceberg and sweeps what is left over in the lake.",
)
