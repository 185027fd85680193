"""Starts the servers under test and reads what they cost from the kernel.

Every server listens on a free loopback port, keeps its data and its log in a directory of its own,
and is stopped by its own process id. CPU time counts all threads of the process, user and system.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECS_MAX = 30.0
STOP_SECS_MAX = 30.0
SETTLE_SECS_MAX = 3.0
SETTLE_STEP_SECS = 0.25
LOG_TAIL_LINES = 20
TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
ZOMBI = Path(sys.executable).parent / "zombi"


class BenchError(Exception):
    """The measurement is worthless: a server did not start or answered with errors."""


@dataclass(frozen=True)
class Server:
    """A running server, its address, and the bearer token it accepts."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    token: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def cpu_secs(self) -> float:
        # The command's name may hold spaces, so fields are counted from its closing bracket.
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SEC

    def settled_cpu_secs(self) -> float:
        """CPU time once background work (flushes, merges) that the load left behind is done."""
        used = self.cpu_secs()
        for _ in range(int(SETTLE_SECS_MAX / SETTLE_STEP_SECS)):
            time.sleep(SETTLE_STEP_SECS)
            before, used = used, self.cpu_secs()
            if used - before <= 1 / TICKS_PER_SEC:
                break
        return used

    def rss_peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kilobytes = status.partition("VmHWM:")[2].split()[0]
        return int(kilobytes) / 1024

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


@contextmanager
def gateway(durability: str, home: Path) -> Iterator[Server]:
    """A real gateway with authentication, metrics and limits on."""
    tokens = home / "tokens.json"
    token = create_token(tokens)
    port = free_port()
    settings = {
        "ZOMBI_DATA_DIR": str(home / "data"),
        "ZOMBI_HOST": "127.0.0.1",
        "ZOMBI_PORT": str(port),
        "ZOMBI_DURABILITY": durability,
        "ZOMBI_TOKENS_FILE": str(tokens),
        # Nothing is flushed away during the bench, so the buffer must hold all of it.
        "ZOMBI_MAX_HOT_BYTES_MB": "65536",
    }
    with running([str(ZOMBI), "gateway"], settings, port, home, token) as server:
        yield server


@contextmanager
def floor(home: Path) -> Iterator[Server]:
    """The server that does nothing."""
    port = free_port()
    command = [sys.executable, "-m", "bench.floor", str(port)]
    # It gets a token as well: the header must cost both servers the same.
    with running(command, {}, port, home, secrets.token_urlsafe(32)) as server:
        yield server


@contextmanager
def running(
    command: list[str], settings: dict[str, str], port: int, home: Path, token: str | None
) -> Iterator[Server]:
    log = home / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment(settings), stdout=sink, stderr=subprocess.STDOUT
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, token)
    try:
        wait_until_live(server)
        yield server
    finally:
        stop(process)


def create_token(tokens: Path) -> str:
    command = [str(ZOMBI), "token", "create", "bench", "--role", "produce", "--role", "read"]
    command += ["--role", "pipeline"]
    done = subprocess.run(
        [*command, "--file", str(tokens)], env=environment({}), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BenchError(f"zombi token create failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.split()[-1]


def environment(settings: dict[str, str]) -> dict[str, str]:
    """The caller's environment without its own ZOMBI_ settings, which would skew the figures."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ZOMBI_")}
    return inherited | settings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_live(server: Server) -> None:
    deadline = time.monotonic() + START_SECS_MAX
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise BenchError(f"the server exited at start:\n{server.log_tail()}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health/live", headers=server.headers).is_success:
                return
        time.sleep(0.05)
    raise BenchError(f"no answer within {START_SECS_MAX:.0f} s:\n{server.log_tail()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
