"""A worker that is stopped in the middle of a commit and woken when the world has moved on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lake.staging import stage
from tests.lake.worlds import put, rows
from zombi_platform.cuts import Cut, Range
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

STOPS = ["commit.loaded", "commit.manifests-written", "commit.checked", "commit.done"]


class Worker:
    """A process that freezes itself at a place."""

    def __init__(self, data_dir: Path, cut: Cut, place: str, action: str = "stop") -> None:
        order = data_dir / f"order-{place}"
        order.write_bytes(msgspec.json.encode([cut]))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        environ |= {"ZOMBI_DATA_DIR": str(data_dir), "ZOMBI_FAILPOINTS": f"{place}={action}"}
        environ |= {"ZOMBI_DELETE_GRACE_SECS": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.lake.worker", str(order)],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def wait_until_frozen(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it did not stop: {status}"

    def wake(self) -> list[dict[str, Any]]:
        """Everything it said from beginning to end."""
        self.process.send_signal(signal.SIGCONT)
        return self.finish()

    def finish(self) -> list[dict[str, Any]]:
        said, _ = self.process.communicate()
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(Settings(data_dir=tmp_path, delete_grace_secs=0))


def metadata_files(lake: Lake) -> list[str]:
    place = f"{lake.storage.table_location('orders')}/metadata/"
    return [file.location for file in lake.storage.files(place)]


@pytest.mark.parametrize("place", STOPS)
def test_a_worker_woken_after_another_finished_adds_nothing(
    lake: Lake, tmp_path: Path, place: str
) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 9))
    frozen = Worker(tmp_path, cut, place)
    frozen.wait_until_frozen()
    added = put(lake, cut)
    lake.sweep("orders", metadata_files(lake))
    last = frozen.wake()[-1]
    assert (added, last["events"]) in {(9, 0), (0, 9)}
    assert (added == 0) == (place == "commit.done")
    assert rows(lake) == [(0, n) for n in range(1, 10)]


def test_a_worker_whose_manifests_were_swept_writes_them_again(lake: Lake, tmp_path: Path) -> None:
    put(lake, stage(lake.storage, "orders", 1, Range(0, 1, 3)))
    frozen = Worker(
        tmp_path, stage(lake.storage, "orders", 2, Range(0, 4, 6)), "commit.manifests-written"
    )
    frozen.wait_until_frozen()
    assert len(lake.sweep("orders", metadata_files(lake)).deleted) == 2
    assert frozen.wake()[-1]["events"] == 3
    assert rows(lake) == [(0, n) for n in range(1, 7)]


@pytest.mark.parametrize("place", [*STOPS, "create.done"])
def test_a_killed_worker_leaves_nothing_that_it_did_not_announce(
    lake: Lake, tmp_path: Path, place: str
) -> None:
    cut = stage(lake.storage, "orders", 1, Range(0, 1, 9))
    killed = Worker(tmp_path, cut, place, "kill")
    announced = killed.finish()
    assert killed.process.returncode == -signal.SIGKILL
    assert put(lake, cut) == (0 if place == "commit.done" else 9)
    paths = {path for said in announced for path in said["paths"]}
    assert set(lake.strays("orders")) <= paths
    lake.sweep("orders", paths)
    assert lake.strays("orders") == []
    assert rows(lake) == [(0, n) for n in range(1, 10)]
