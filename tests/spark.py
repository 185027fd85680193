"""Real Spark servers for integration tests, stopped by their pid: `zombi spark`, one warm for
the whole session, and one that knows nothing of this platform, as on a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.platform import wait_until
from tests.s3 import ACCESS_KEY, SECRET_KEY

ZOMBI = Path(sys.executable).with_name("zombi")


@pytest.fixture(scope="session")
def spark_server() -> Iterator[SparkServer]:
    """Warm, with the keys of the tests' object stores."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    server = SparkServer(environ=keys, spark_master="local[2,3]")
    yield server
    server.stop()


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
        return self._reap()

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def _reap(self) -> int:
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class ForeignServer:
    """A Spark Connect server whose Python has the libraries, but not this package."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.remote = f"sc://127.0.0.1:{self.port}"
        home = Path(find_spec("pyspark").origin).parent
        python = directory / "python"
        # Without `site` the .pth file that leads to this package is not followed.
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="{home.parent}:$PYTHONPATH" exec {sys.executable} -S "$@"\n'
        )
        python.chmod(0o755)
        conf = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.log = directory / "spark.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(home / "bin" / "spark-submit", "--master", "local[1,3]"),
                    *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                    *(
                        word
                        for name, value in conf.items()
                        for word in ("--conf", f"{name}={value}")
                    ),
                    "spark-internal",
                ],
                env=inherited | {"SPARK_HOME": str(home), "PYSPARK_PYTHON": str(python)},
                stdout=log,
                stderr=log,
                cwd=directory,
            )
        wait_until(self._answers, f"{self.remote}: {self.log}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return is_open(self.port)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
