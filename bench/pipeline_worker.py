"""A warm worker for the bench: flushes each table named on its input, one answer a line."""

import json
import os
import sys
from dataclasses import asdict

from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings


def main() -> None:
    with Pipeline.opened(Settings.from_env(os.environ)) as pipeline:
        pipeline.engine.ready()
        answer({"ready": True})
        for line in sys.stdin:
            answer(asdict(pipeline.flush(line.strip())))


def answer(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
