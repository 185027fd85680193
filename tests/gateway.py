"""A real gateway process for tests, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ZOMBI = Path(sys.executable).with_name("zombi")


class Gateway:
    """A running gateway; `kill` is SIGKILL, `stop` is SIGTERM."""

    def __init__(self, data_dir: Path, **settings: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        environ |= {"ZOMBI_DATA_DIR": str(data_dir), "ZOMBI_PORT": "0"}
        environ |= {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [ZOMBI, "gateway"], env=environ, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is None:
            self._reap()
            raise AssertionError(f"the gateway did not start: {line!r}")
        self.port = int(found[1])
        self.url = found[0]

    def rss_mb(self) -> float:
        """Memory in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        assert self.process.stdout is not None
        code = self.process.wait()
        self.process.stdout.close()
        return code


@contextmanager
def running(data_dir: Path, **settings: str) -> Iterator[Gateway]:
    gateway = Gateway(data_dir, **settings)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.stop()
