"""A worker in a process of its own: commits the cuts of a file and says what it did.

Prints the tombstones it announces as they come, one JSON line each, then its result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from zombi_platform import failpoints
from zombi_platform.cuts import Cut
from zombi_platform.errors import ZombiError
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings


def announce(paths: Sequence[str], prefixes: Sequence[str]) -> None:
    say({"paths": list(paths), "prefixes": list(prefixes)})


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = Settings.from_env(os.environ)
    failpoints.arm(settings.failpoints)
    cuts = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Cut])
    try:
        done = Lake(settings).commit(cuts[0].table, cuts, before_write=announce)
    except ZombiError as error:
        say({"error": error.code})
    else:
        say({"events": done.events, "snapshot_id": done.snapshot_id})


if __name__ == "__main__":
    main()
