"""Keeps the services running: start in order, restart with back-off, stop in reverse order.

A service that ends before it has ever answered ends the start; one that dies later is
started again, ever more slowly, and when it dies too often everything stops. Whatever a dead
service left running is ended before its successor starts, so two never work side by side.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zombi_platform.errors import StartupError
from zombi_platform.supervisor import sessions
from zombi_platform.supervisor.children import Child
from zombi_platform.supervisor.logs import ServiceLog
from zombi_platform.supervisor.services import Plan, Service

PROBE_EVERY_SECS: Final = 0.1


@dataclass(frozen=True)
class Patience:
    """How long the supervisor bears with a service that dies again and again."""

    restarts_max: int = 10
    """Restarts in a row, each after a life shorter than `steady_secs`."""
    steady_secs: float = 60.0
    backoff_first_secs: float = 0.25
    backoff_max_secs: float = 15.0

    def backoff_secs(self, restarts: int) -> float:
        return min(self.backoff_first_secs * 2.0 ** (restarts - 1), self.backoff_max_secs)


@dataclass
class _Post:
    """A service and what is known about it."""

    service: Service
    log: ServiceLog
    child: Child | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        lock_fd: int,
        say: Callable[[str], None],
        patience: Patience = Patience(),
    ) -> None:
        self._say = say
        self._patience = patience
        self._guard = Guard(lock_fd)
        self._stopping = asyncio.Event()
        logs = plan.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        width = max(len(service.name) for service in plan.services)
        self._posts = {
            service.name: _Post(
                service, ServiceLog(logs / f"{service.name}.log", service.name, number, width)
            )
            for number, service in enumerate(plan.services)
        }

    async def run(self, started: Callable[[], None]) -> None:
        """Start everything, call `started`, keep it up until a signal comes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        works = [self._keep(post) for post in self._posts.values()]
        works += [self._announce(started), self._until_stopped()]
        keepers = [asyncio.create_task(work) for work in works]
        try:
            while not self._stopping.is_set():
                done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                keepers = [task for task in keepers if task not in done]
        finally:
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop_all()

    async def _announce(self, started: Callable[[], None]) -> None:
        for post in self._posts.values():
            await post.answers.wait()
        started()

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            # The second one does not wait for anybody.
            for child in self._children():
                sessions.send(child.pid, signal.SIGKILL)
        else:
            self._say("stopping")
        self._stopping.set()

    async def _keep(self, post: _Post) -> None:
        for name in post.service.after:
            if name in self._posts:
                await self._posts[name].answers.wait()
        restarts = 0
        while True:
            born = asyncio.get_running_loop().time()
            code = await self._live(post)
            if not post.answers.is_set():
                raise StartupError(_did_not_start(post, code))
            steady = asyncio.get_running_loop().time() - born > self._patience.steady_secs
            restarts = 1 if steady else restarts + 1
            if restarts > self._patience.restarts_max:
                raise StartupError(f"{post.service.name} died {restarts} times in a row; giving up")
            wait_secs = self._patience.backoff_secs(restarts)
            self._say(f"{post.service.name} {_ended(code)}; starts again in {wait_secs:g} s")
            await asyncio.sleep(wait_secs)

    async def _live(self, post: _Post) -> int:
        """One life of a service, from start to exit code."""
        service = post.service
        post.child = Child.start(service.command, service.environ, post.log.write)
        self._guard.watch(post.child.pid)
        probing = asyncio.create_task(self._probe(post))
        code = await post.child.wait()
        probing.cancel()
        await post.child.end(service.stop_secs)
        self._guard.forget(post.child.pid)
        post.child = None
        return code

    async def _probe(self, post: _Post) -> None:
        deadline = asyncio.get_running_loop().time() + post.service.ready_secs
        while not await post.service.probe():
            if asyncio.get_running_loop().time() > deadline and post.child is not None:
                self._say(
                    f"{post.service.name} does not answer after {post.service.ready_secs:g} s"
                )
                sessions.send(post.child.pid, signal.SIGKILL)
                return
            await asyncio.sleep(PROBE_EVERY_SECS)
        if post.answers.is_set():
            self._say(f"{post.service.name} answers again")
        post.answers.set()

    def _children(self) -> list[Child]:
        return [post.child for post in self._posts.values() if post.child is not None]

    async def _stop_all(self) -> None:
        for post in reversed(self._posts.values()):
            if post.child is not None and not await post.child.end(post.service.stop_secs):
                self._say(f"{post.service.name} had to be killed")
        self._guard.dismiss()
        for post in self._posts.values():
            post.log.close()


class Guard:
    """The process that ends the sessions if this one is killed; started again if it dies."""

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._watched: set[int] = set()
        self._process = self._start()

    def watch(self, session: int) -> None:
        self._watched.add(session)
        self._tell([f"+{session}"])

    def forget(self, session: int) -> None:
        self._watched.discard(session)
        self._tell([f"-{session}"])

    def dismiss(self) -> None:
        self._tell([sessions.FAREWELL])
        self._close()

    def _start(self) -> subprocess.Popen[str]:
        # It inherits the lock: nobody starts here while it still ends what we left.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(sessions.__file__))],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[self._lock_fd],
        )

    def _tell(self, lines: Iterable[str]) -> None:
        if self._process.poll() is not None:
            self._close()
            self._process = self._start()
            lines = [f"+{session}" for session in self._watched]
        assert self._process.stdin is not None
        self._process.stdin.writelines(f"{line}\n" for line in lines)
        self._process.stdin.flush()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _did_not_start(post: _Post, code: int) -> str:
    last = "\n".join(f"  {line}" for line in post.log.last)
    return f"{post.service.name} {_ended(code)} before it answered; its last words:\n{last}"
