"""What Dagster loads: settings from the environment, everything else from `defs/`."""

from __future__ import annotations

import os
import warnings
from datetime import UTC, datetime

import dagster as dg

from zombi_platform.defs.assembly import assemble
from zombi_platform.failpoints import arm
from zombi_platform.settings import Settings


@dg.definitions
def defs() -> dg.Definitions:
    # Dagster's version is pinned, so what is in beta there does not change under us.
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    settings = Settings.from_env(os.environ)
    arm(settings.failpoints)
    return assemble(settings, datetime.now(UTC))
