"""A real `zombi spark` for integration tests: one warm server a session, stopped by its pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ZOMBI = Path(sys.executable).with_name("zombi")


class SparkServer:
    """A running server on a port of 127.0.0.1; Spark's packages come from Ivy's own cache."""

    def __init__(
        self, *, port: int | None = None, environ: dict[str, str] | None = None, **settings: str
    ) -> None:
        self.port = port or free_port()
        self.remote = f"sc://127.0.0.1:{self.port}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZOMBI_")}
        settings = {"spark_port": str(self.port), **settings}
        named = {f"ZOMBI_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(
            [ZOMBI, "spark"],
            env=inherited | (environ or {}) | named,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if self.remote not in line:
            self.stop()
            raise AssertionError(f"Spark did not start: {line!r}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
