"""Puts the definitions together for one set of settings."""

from __future__ import annotations

from datetime import datetime

import dagster as dg

from zombi_platform.defs.flush import (
    flush_job,
    hot_buffer,
    hot_cleanup,
    hot_cut,
    merged_files,
    rows_reconcile,
    snapshot,
    staged_files,
)
from zombi_platform.defs.flush_all import flush_all
from zombi_platform.defs.hours import make_events
from zombi_platform.defs.resources import make_resources
from zombi_platform.defs.schedules import daily_flush
from zombi_platform.defs.sensors import make_sensors
from zombi_platform.settings import Settings


def assemble(settings: Settings, now: datetime) -> dg.Definitions:
    return dg.Definitions(
        assets=[
            hot_buffer,
            hot_cut,
            staged_files,
            snapshot,
            hot_cleanup,
            merged_files,
            make_events(now),
        ],
        asset_checks=[rows_reconcile],
        jobs=[flush_job, flush_all],
        schedules=[daily_flush],
        sensors=make_sensors(settings),
        resources=make_resources(settings),
        # A process for each step would cost more than the steps do.
        executor=dg.in_process_executor,
    )
