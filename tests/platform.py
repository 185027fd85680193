"""A real `zombi up` for tests, on free ports of 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gateway import ZOMBI

POLL = threading.Event()


def wait_until(
    condition: Callable[[], object], what: str, secs: float = 150, every_secs: float = 0.1
) -> None:
    """Wait for a condition; `secs` bounds a hang, it is not a measurement."""
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        POLL.wait(every_secs)


class Platform:
    """A running `zombi up`; its output is in `log`."""

    def __init__(self, home: Path, *options: str, **settings: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        environ |= {"ZOMBI_DATA_DIR": str(home), "ZOMBI_PORT": "0", "ZOMBI_DAGSTER_PORT": "0"}
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        self.home = home
        self.log = home.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [ZOMBI, "up", *options], env=environ, stdout=log, stderr=log
            )
        wait_until(lambda: self.services or self.process.poll() is not None, "up")
        assert self.process.poll() is None, self.log.read_text()

    @property
    def services(self) -> dict[str, str]:
        """Names and addresses of what runs, as the lock file tells them."""
        try:
            known = json.loads((self.home / "up.lock").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return dict(known["services"]) if known["pid"] == self.process.pid else {}

    def pid(self, program: str) -> int:
        """The process of a service, found by what its command line says."""
        (pid,) = (pid for pid, line in self.processes().items() if program in line)
        return pid

    def processes(self) -> dict[int, str]:
        """Every process that has this platform's data directory in its environment."""
        found = {}
        mark = f"ZOMBI_DATA_DIR={self.home}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = line
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return {pid: line for pid, line in found.items() if line}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def up(home: Path, *options: str, **settings: str) -> Iterator[Platform]:
    platform = Platform(home, *options, **settings)
    try:
        yield platform
    finally:
        if platform.process.poll() is None:
            platform.stop()
