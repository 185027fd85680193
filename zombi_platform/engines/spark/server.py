"""The warm Spark Connect server of this machine, in the foreground: `zombi spark`.

Java and port are checked first, so that what is wrong is said in words. Spark's own log
appears when it fails to start; afterwards its warnings do. The server listens on loopback
alone and ends with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from zombi_platform.engines.java import check_java
from zombi_platform.errors import StartupError
from zombi_platform.settings import Settings

HOST: Final = "127.0.0.1"
ICEBERG: Final = "1.12.0"
PACKAGES: Final = (
    f"org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:{ICEBERG}",
    f"org.apache.iceberg:iceberg-aws-bundle:{ICEBERG}",
)
SERVER_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_SECS_MAX: Final = 600.0
"""The first start downloads the packages, 115 MB."""
STOP_SECS_MAX: Final = 20.0
POLL_SECS: Final = 0.1
LOG_TAIL_LINES: Final = 30
PR_SET_PDEATHSIG: Final = 1


def run(settings: Settings, environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM or Ctrl-C; the code to exit with."""
    check_java(environ)
    check_port(settings.spark_port)
    server = SparkServer(command(settings), environment(environ))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.ask_to_stop())
    try:
        if server.wait_until_it_answers(settings.spark_port):
            address = f"sc://{HOST}:{settings.spark_port}"
            print(f"zombi spark answers at {address}", flush=True)  # noqa: T201
        return server.wait()
    finally:
        server.kill()


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise StartupError(
                f"port {port} of {HOST} is not free: {error.strerror}; is a Spark server running "
                "already? Stop it or set ZOMBI_SPARK_PORT"
            ) from error


def command(settings: Settings) -> list[str]:
    conf = {
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": settings.spark_port,
        # Flushes share one session, which must outlive a quiet night.
        "spark.connect.session.manager.defaultSessionTimeout": -1,
        "spark.driver.host": HOST,
        "spark.driver.bindAddress": HOST,
        "spark.jars.packages": ",".join(PACKAGES),
        "spark.log.level": "INFO" if settings.log_level == "debug" else "WARN",
        "spark.python.daemon.module": "zombi_platform.engines.spark.daemon",
        "spark.ui.enabled": "false",
    }
    options = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    return [
        str(_spark_home() / "bin" / "spark-submit"),
        *("--class", SERVER_CLASS, "--master", settings.spark_master),
        *("--driver-memory", settings.spark_memory),
        *options,
        "spark-internal",
    ]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **environ,
        "SPARK_HOME": str(_spark_home()),
        "SPARK_LOCAL_IP": HOST,
        # Tasks run in this very installation: same Python, same packages, same code.
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }


def _spark_home() -> Path:
    # Found, not imported: the import takes a second that the server does not need.
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise StartupError("the package pyspark is not installed; run `make venv`")
    return Path(spec.origin).parent


class SparkServer:
    """The JVM as a child in a session of its own: Ctrl-C reaches it through us only."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str]) -> None:
        self._stopping = False
        self._answered = False
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._process = subprocess.Popen(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait_until_it_answers(self, port: int) -> bool:
        """False if it was asked to stop before."""
        deadline = time.monotonic() + START_SECS_MAX
        while not self._stopping:
            if self._process.poll() is not None:
                raise StartupError(f"Spark did not start:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise StartupError(
                    f"Spark did not answer within {START_SECS_MAX:.0f} s:\n{self._last_words()}"
                )
            try:
                socket.create_connection((HOST, port), POLL_SECS).close()
            except OSError:
                time.sleep(POLL_SECS)
            else:
                self._answered = True
                return True
        return False

    def wait(self) -> int:
        """The code to exit with once Spark has ended: 0 if it was asked to."""
        code = self._process.wait()
        if not self._stopping:
            raise StartupError(f"Spark ended by itself with code {code}:\n{self._last_words()}")
        return 0

    def ask_to_stop(self) -> None:
        self._stopping = True
        self._process.terminate()
        # Not by waiting here: this runs inside a signal handler.
        last_resort = threading.Timer(STOP_SECS_MAX, self.kill)
        last_resort.daemon = True
        last_resort.start()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line)
            if self._answered:
                sys.stderr.write(line)

    def _last_words(self) -> str:
        self._reader.join(POLL_SECS)
        return "".join(self._tail).rstrip()


def _die_with_parent() -> Callable[[], None] | None:
    """Where Linux can do it: a killed parent takes Spark along, which else keeps the port."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
