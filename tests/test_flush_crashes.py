"""kill -9 and freezes between any two steps of a flush: acked = table and hot, nothing twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from pyiceberg.table import StaticTable

import zombi_platform
from tests.gateway import ZOMBI, Gateway
from tests.oracle import Place, Writers, check, rows_in_hot, rows_in_lake
from zombi_platform.hot import keys
from zombi_platform.hot.store import Store
from zombi_platform.lake.lake import Lake
from zombi_platform.lake.state import LakeState
from zombi_platform.settings import Settings

SCHEDULES = int(os.environ.get("TORTURE_SCHEDULES", "6"))
SEED = int(os.environ.get("TORTURE_SEED", "1"))

SETTINGS = {
    "flush_max_segment": "150",
    "lease_secs": "1",
    "engine": "arrow",
    "snapshots_kept": "5",
    "merge_files_at": "2",
}
"""Small splits, so that a cut has several; short leases, so that a dead worker's ends soon;
merges after every flush."""


def failpoints(*folders: str) -> list[str]:
    """The names of all failpoints in the given parts of the package."""
    root = Path(zombi_platform.__file__).parent
    sources = [path for folder in folders for path in sorted(root.glob(folder))]
    found = {
        name
        for source in sources
        for name in re.findall(r'failpoint\("([^"]+)"\)', source.read_text())
    }
    assert found, f"no failpoint in {folders}"
    return sorted(found)


IN_GATEWAY = failpoints("gateway/**/*.py", "hot/*.py")
IN_WORKER = failpoints("pipeline.py", "engines/*.py", "lake/*.py")


class Platform:
    """A gateway that comes back when it was killed, and workers that flush one table."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.settings = dict(SETTINGS)
        self.gateway = Gateway(home, **self.settings)
        self.writers = Writers(self.gateway.port)

    def restart_gateway(self, failpoint: str | None = None) -> None:
        self.gateway.kill()
        extra = {} if failpoint is None else {"failpoints": failpoint}
        self.gateway = Gateway(self.home, **self.settings, **extra)
        self.writers.move(self.gateway.port)

    def worker(self, failpoint: str | None = None, **settings: str) -> subprocess.Popen[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        settings = self.settings | settings
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        environ |= {"ZOMBI_DATA_DIR": str(self.home), "ZOMBI_URL": self.gateway.url}
        if failpoint is not None:
            environ["ZOMBI_FAILPOINTS"] = failpoint
        return subprocess.Popen(
            [ZOMBI, "flush", "t", "--json"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def flush(self, failpoint: str | None = None, **settings: str) -> tuple[int, str]:
        worker = self.worker(failpoint, **settings)
        out, err = worker.communicate()
        return worker.returncode, out + err

    def flush_until_done(self, **settings: str) -> None:
        """Flush until one succeeds: the lease of a dead worker must end first."""
        while True:
            code, said = self.flush(**settings)
            if code == 0:
                return
            assert "LEASE_HELD" in said, said

    def finish(self) -> None:
        """Stop writing, drain, and hold everything against the oracle."""
        acked = self.writers.stop()
        if self.gateway.process.poll() is not None:
            self.restart_gateway()
        self.check(acked)
        self.flush_until_done()
        self.check(acked)
        assert rows_in_hot(self.gateway.port) == {}, "the hot buffer did not shrink to nothing"
        unknown = self.unknown_files()
        assert not unknown, f"nobody knows of {sorted(unknown)[:5]}"

    def check(self, acked: dict[Place, str]) -> None:
        # The lake first: what moves there between the two reads is then seen twice, not never.
        state = self.state()
        lake = rows_in_lake(None if state is None else state.metadata_location)
        check(acked, lake, rows_in_hot(self.gateway.port))

    def state(self) -> LakeState | None:
        return Lake(Settings(data_dir=self.home)).state("t")

    def unknown_files(self) -> set[str]:
        """Files of the table that no snapshot refers to and no tombstone names."""
        self.gateway.stop()
        files = {f"file://{path}" for path in (self.home / "warehouse/t").rglob("*.*")}
        state = self.state()
        assert state is not None
        paths, prefixes = tombstones(self.home)
        known = files_of(state.metadata_location) | paths
        return {name for name in files - known if not name.startswith(tuple(prefixes))}

    def close(self) -> None:
        self.writers.stop()
        self.gateway.kill()


def tombstones(home: Path) -> tuple[set[str], set[str]]:
    """Paths and prefixes with a tombstone, whether its time has come or not."""
    store = Store(Settings(data_dir=home))
    prefix = keys.TOMBSTONES + b"t:"
    names = [key[len(prefix) :].decode() for key, _ in store.items(prefix)]
    store.close()
    return (
        {name[1:] for name in names if name[0] == "f"},
        {name[1:] for name in names if name[0] == "p"},
    )


def files_of(metadata_location: str) -> set[str]:
    """Every file that a table's metadata leads to."""
    table = StaticTable.from_metadata(metadata_location)
    found = {metadata_location, metadata_location.rsplit("/", 1)[0] + "/version-hint.text"}
    found |= {entry.metadata_file for entry in table.metadata.metadata_log}
    for snapshot in table.metadata.snapshots:
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            found.add(manifest.manifest_path)
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
            found |= {entry.data_file.file_path for entry in entries}
    return found


@pytest.mark.parametrize("seed", range(SEED, SEED + SCHEDULES))
def test_the_oracle_holds_whatever_dies_between_two_steps(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    platform = Platform(tmp_path)
    try:
        for _ in range(2):
            platform.writers.wait_for(chance.randint(100, 600))
            step = f"kill:{chance.randint(1, 3)}"
            if chance.random() < 0.5:
                platform.restart_gateway(f"{chance.choice(IN_GATEWAY)}={step}")
                platform.flush()
                platform.restart_gateway()
            else:
                platform.flush(f"{chance.choice(IN_WORKER)}={step}")
        platform.finish()
    finally:
        platform.close()


def test_a_worker_that_slept_through_its_lease_finds_its_work_done(tmp_path: Path) -> None:
    """Frozen before its commit and woken after another worker finished, it says so."""
    platform = Platform(tmp_path)
    try:
        for place in ("pipeline.committing", "commit.checked", "stage.written"):
            platform.writers.wait_for(300)
            sleeper = platform.worker(f"{place}=stop")
            wait_until_stopped(sleeper)
            try:
                platform.flush_until_done()
            finally:
                sleeper.send_signal(signal.SIGCONT)
                out, err = sleeper.communicate()
            assert sleeper.returncode == 1 and "FENCED" in out, out + err
        platform.finish()
    finally:
        platform.close()


@pytest.mark.parametrize(
    ("place", "merges"),
    [("pipeline.merging", "2"), ("commit.checked", "2"), ("commit.checked", "0")],
)
def test_a_worker_that_slept_through_its_merge_breaks_nothing(
    tmp_path: Path, place: str, merges: str
) -> None:
    """Woken after another worker swept: with another merge on top, or with nothing changed."""
    platform = Platform(tmp_path)
    try:
        for _ in range(2):
            platform.writers.wait_for(300)
            platform.flush_until_done(merge_files_at="0")
        acked = platform.writers.stop()
        platform.flush_until_done(merge_files_at="0")
        platform.settings["delete_grace_secs"] = "0"
        platform.restart_gateway()
        sleeper = platform.worker(f"{place}=stop")
        wait_until_stopped(sleeper)
        try:
            platform.flush_until_done(merge_files_at=merges)
        finally:
            sleeper.send_signal(signal.SIGCONT)
            out, err = sleeper.communicate()
        assert sleeper.returncode == 0, out + err
        (flushed,) = json.loads(out)["flushed"]
        # Before its manifests it is told that its lease is over, after them that it was late.
        won = place == "commit.checked" and merges == "0"
        assert (flushed["merged_files"] > 0) == won, out + err
        platform.check(acked)
        platform.flush_until_done()
        platform.finish()
    finally:
        platform.close()


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    """Wait for SIGSTOP to have come, or for the process to end without it."""
    while process.poll() is None:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"the worker was not stopped: {process.communicate()}")
