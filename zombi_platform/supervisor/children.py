"""One running process of a service: started in its own session, ended with all it started.

The kernel sends SIGTERM to the process when the supervisor dies; the guard (`sessions`)
covers what the process has started in turn. Output is read as it comes and handed on line
by line, a line past the limit in pieces.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from zombi_platform.errors import StartupError
from zombi_platform.supervisor import sessions

LINE_BYTES_MAX: Final = 64 * 1024
_PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """Not asyncio's own process: that one ends only when everybody who has its output has."""

    def __init__(self, process: subprocess.Popen[bytes], tell: Callable[[bytes], None]) -> None:
        self._process = process
        self._reading = asyncio.create_task(self._read(tell))
        self.pid = process.pid

    @classmethod
    def start(
        cls, command: Sequence[str], environ: Mapping[str, str], tell: Callable[[bytes], None]
    ) -> Child:
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise StartupError(f"cannot run {command[0]}: {error.strerror or error}") from error
        return cls(process, tell)

    async def wait(self) -> int:
        """The exit code, negative for a signal, when the process itself has ended."""
        while (code := self._process.poll()) is None:
            await asyncio.sleep(sessions.POLL_SECS)
        return code

    async def end(self, secs: float) -> bool:
        """End the whole session: SIGTERM, `secs` later SIGKILL. False if it took the latter."""
        sessions.send(self.pid, signal.SIGTERM)
        gentle = await self._gone_within(secs)
        while not gentle and sessions.members(self.pid):
            sessions.send(self.pid, signal.SIGKILL)
            await asyncio.sleep(sessions.POLL_SECS)
        await self.wait()
        await self._reading
        return gentle

    async def _gone_within(self, secs: float) -> bool:
        deadline = asyncio.get_running_loop().time() + secs
        while sessions.members(self.pid):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(sessions.POLL_SECS)
        return True

    async def _read(self, tell: Callable[[bytes], None]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        rest = b""
        while data := await reader.read(LINE_BYTES_MAX):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                tell(line)
            if len(rest) > LINE_BYTES_MAX:
                tell(rest)
                rest = b""
        if rest:
            tell(rest)
        transport.close()
