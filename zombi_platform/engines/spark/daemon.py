"""The process that Spark forks its Python workers from, on the server of this machine.

Spark ends a worker after a minute without work. Workers forked from a process that has
imported everything already start in milliseconds; with a plain daemon each would spend
half a CPU-second on imports first.
"""

from __future__ import annotations

import gc
import os

from pyspark import daemon

import zombi_platform.engines.merging
import zombi_platform.engines.spark.task  # noqa: F401
from zombi_platform.failpoints import arm
from zombi_platform.settings import Settings

if __name__ == "__main__":
    arm(Settings.from_env(os.environ).failpoints)
    # Spark collects garbage after every task; what is imported is none.
    gc.collect()
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]
