"""`zombi up`: order, restarts, locks and ports, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.gateway import ZOMBI, running
from tests.platform import Platform, up, wait_until
from zombi_platform.errors import StartupError
from zombi_platform.supervisor import logs, sessions
from zombi_platform.supervisor.services import Plan, Service
from zombi_platform.supervisor.supervision import Patience, Supervisor


def refused(home: Path, **settings: str) -> str:
    """What a `zombi up` that does not start says."""
    with pytest.raises(AssertionError) as caught:
        Platform(home, "--no-dagster", "--engine=arrow", **settings)
    return str(caught.value)


def alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_one_interrupt_stops_everything(tmp_path: Path) -> None:
    with up(tmp_path / "home", "--no-dagster", "--engine=arrow") as platform:
        assert alive(platform.services["gateway"])
        assert "takes events" in platform.log.read_text()
        assert platform.stop() == 0
        assert platform.processes() == {}
    assert "answers at" in (tmp_path / "home/logs/gateway.log").read_text()


def test_a_second_one_says_what_is_running(tmp_path: Path) -> None:
    with up(tmp_path / "home", "--no-dagster", "--engine=arrow") as platform:
        second = subprocess.run(
            [ZOMBI, "up"],
            env={**os.environ, "ZOMBI_DATA_DIR": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert second.returncode == 1
        assert f"process {platform.process.pid}" in second.stderr
        assert platform.services["gateway"] in second.stderr


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "other") as gateway:
        told = refused(tmp_path / "home", port=str(gateway.port))
    assert f"127.0.0.1:{gateway.port} (ZOMBI_PORT)" in told


def test_a_service_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    with running(tmp_path / "home"):
        told = refused(tmp_path / "home")
    assert "gateway ended with code 1 before it answered" in told


def test_a_killed_gateway_comes_back_at_the_same_address(tmp_path: Path) -> None:
    with up(tmp_path / "home", "--no-dagster", "--engine=arrow") as platform:
        url = platform.services["gateway"]
        first = platform.pid("zombi gateway")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "gateway answers again" in platform.log.read_text(), "again")
        assert alive(url)
        assert platform.pid("zombi gateway") != first
        assert platform.stop() == 0


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with up(tmp_path / "home", "--no-dagster", "--engine=arrow") as platform:
        platform.kill()
        wait_until(lambda: not platform.processes(), "all processes gone")
    with up(tmp_path / "home", "--no-dagster", "--engine=arrow") as again:
        assert alive(again.services["gateway"])


def service(name: str, script: str, *after: str) -> Service:
    async def ready() -> bool:
        return True

    return Service(name, ("sh", "-c", script), os.environ, ready, "-", "a test", after)


def supervise(tmp_path: Path, *services: Service, patience: Patience) -> list[str]:
    """What the supervisor said until it gave up."""
    said: list[str] = []

    async def run() -> None:
        await Supervisor(Plan(services, tmp_path), fd, said.append, patience).run(lambda: None)

    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(StartupError) as caught:
            asyncio.run(run())
    finally:
        os.close(fd)
    return [*said, str(caught.value)]


def test_a_service_that_keeps_dying_ends_everything(tmp_path: Path) -> None:
    said = supervise(
        tmp_path,
        service("steady", "exec sleep 1000"),
        service("dying", "sleep 0.2; exit 3", "steady"),
        patience=Patience(restarts_max=2, backoff_first_secs=0.01, backoff_max_secs=0.015),
    )
    assert said == [
        "dying ended with code 3; starts again in 0.01 s",
        "dying answers again",
        "dying ended with code 3; starts again in 0.015 s",
        "dying answers again",
        "dying died 3 times in a row; giving up",
    ]


def test_what_a_dead_service_left_is_ended_before_it_starts_again(tmp_path: Path) -> None:
    parents = tmp_path / "parents"
    supervise(
        tmp_path,
        service("parent", f"sleep 1000 & echo $$ >>{parents}; sleep 0.2; kill -9 $$"),
        patience=Patience(restarts_max=1, backoff_first_secs=0.01),
    )
    sessions_used = [int(line) for line in parents.read_text().split()]
    assert len(sessions_used) == 2
    assert not any(sessions.members(session) for session in sessions_used)


def test_the_guard_ends_sessions_when_its_input_ends(tmp_path: Path) -> None:
    orphan = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo started; wait"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert orphan.stdout is not None
    orphan.stdout.readline()
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", sessions.__file__], stdin=subprocess.PIPE, text=True
    )
    guard.communicate(f"+{orphan.pid}\n+1\n-1\n")
    assert orphan.wait() == -signal.SIGTERM
    assert sessions.members(orphan.pid) == []
    orphan.stdout.close()


def test_log_files_are_bounded(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = logs.ServiceLog(tmp_path / "chatty.log", "chatty", 0, 8)
    line = b"\x1b[31m" + b"x" * (logs.FILE_BYTES_MAX // 10)
    for _ in range(35):
        log.write(line)
    log.close()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["chatty.log", "chatty.log.1"]
    assert all(path.stat().st_size <= logs.FILE_BYTES_MAX for path in tmp_path.iterdir())
    assert b"\x1b" not in (tmp_path / "chatty.log").read_bytes()
    assert capfdbinary.readouterr().out.startswith(b"chatty   | x")
