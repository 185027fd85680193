"""Turn a cut into Parquet and small files into one: Arrow here or Spark beside, one contract.

`open_engine` picks the engine that the settings ask for. An engine's own packages are
imported when it is opened, so that a machine without Java, and a command that stages
nothing, do without them.
"""

from __future__ import annotations

import os

from zombi_platform.engines.contract import Engine, MergingJob, SplitResult, StagingJob
from zombi_platform.engines.java import find_java
from zombi_platform.settings import Settings

__all__ = [
    "Engine",
    "MergingJob",
    "SplitResult",
    "StagingJob",
    "choose_engine",
    "open_engine",
]


def choose_engine(settings: Settings) -> tuple[str, str]:
    """The engine's name and why it is that one, to be shown to whoever runs it."""
    if settings.engine is not None:
        return settings.engine, f"ZOMBI_ENGINE={settings.engine}"
    if settings.spark_remote is not None:
        return "spark", "ZOMBI_SPARK_REMOTE is set"
    if find_java(os.environ) is not None:
        return "spark", "Java is installed; ZOMBI_ENGINE=arrow does without"
    return "arrow", "Java is not installed, which Spark needs"


def open_engine(settings: Settings) -> Engine:
    """The engine to stage with; nothing is connected to before it is used."""
    if choose_engine(settings)[0] == "spark":
        from zombi_platform.engines.spark.engine import SparkEngine

        return SparkEngine.from_settings(settings)
    from zombi_platform.engines.arrow import ArrowEngine

    return ArrowEngine(settings.stage_concurrency)
