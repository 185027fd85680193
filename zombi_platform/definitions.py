"""What Dagster loads."""

from __future__ import annotations

import dagster as dg

defs = dg.Definitions(executor=dg.in_process_executor)
