"""The gateway's end of the staging process: starts it, talks to it, notices when it dies.

Calls block and come one at a time, from one thread. A process that died or fell silent is
replaced at the next call; the blocks it knew are lost with it and must be staged anew.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Final

import pyarrow as pa

from zombi_platform.catalog.live import messages
from zombi_platform.catalog.live.messages import (
    Done,
    Failed,
    Forget,
    Hello,
    Publish,
    Published,
    Reply,
    Request,
    Stage,
    Unknown,
)
from zombi_platform.errors import TransientError, ZombiError
from zombi_platform.events import COLUMNS
from zombi_platform.lake.storage import Storage

CALL_SECS_MAX: Final = 120.0
STOP_SECS_MAX: Final = 5.0


class StagerDiedError(TransientError):
    """The staging process is gone, and with it what it knew of its blocks."""

    code = "LIVE_STAGER_DIED"


class StagingProcess:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._process: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        """Start the process unless it runs, so that the first load need not wait for it."""
        if self._process is None:
            self._start()

    def stage(self, request: Stage, batches: Iterable[pa.RecordBatch]) -> None:
        """Have the rows written; whatever their source raises is raised here."""
        reply, _ = self._call(request, batches)
        assert isinstance(reply, Done)

    def publish(self, request: Publish) -> tuple[Published, bytes]:
        reply, content = self._call(request)
        assert isinstance(reply, Published)
        return reply, content

    def forget(self, request: Forget) -> None:
        if self._process is not None:
            self._call(request)

    def close(self) -> None:
        """End the process, gently at first."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def _call(
        self, request: Request, batches: Iterable[pa.RecordBatch] | None = None
    ) -> tuple[Reply, bytes]:
        process = self._process or self._start()
        # A process that hangs is as good as dead, and reading or writing on ends when it is.
        watchdog = threading.Timer(CALL_SECS_MAX, process.kill)
        watchdog.start()
        failure = None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(messages.line(request))
            if batches is not None:
                failure = _send(process.stdin, batches)
            process.stdin.flush()
            reply, content = receive(process.stdout)
        except (OSError, EOFError) as error:
            process.kill()
            code = self._reap()
            raise StagerDiedError(f"the staging process died (exit code {code})") from error
        except BaseException:
            # Its answer would be taken for that of the next request.
            process.kill()
            self._reap()
            raise
        finally:
            watchdog.cancel()
        if failure is not None:
            raise failure
        if isinstance(reply, Unknown):
            raise StagerDiedError("the staging process has died and begun anew")
        if isinstance(reply, Failed):
            raise reply.error()
        return reply, content

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zombi_platform.catalog.live.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(messages.line(Hello(self._storage)))
        self._process.stdin.flush()
        return self._process

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            # Closing tries to send what the process no longer reads.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code


def _send(pipe: IO[bytes], batches: Iterable[pa.RecordBatch]) -> ZombiError | None:
    """Send rows as they come; if their source fails, the stream ends early, so that the other
    end refuses it and is ready for the next request."""
    with pa.ipc.new_stream(pa.PythonFile(pipe, "w"), COLUMNS) as writer:
        try:
            for batch in batches:
                writer.write_batch(batch)
        except ZombiError as error:
            return error
    return None


def receive(pipe: IO[bytes]) -> tuple[Reply, bytes]:
    """A reply and what comes with it; `EOFError` if they are not whole."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    reply = messages.replies.decode(line)
    content = pipe.read(reply.size) if isinstance(reply, Published) else b""
    if isinstance(reply, Published) and len(content) < reply.size:
        raise EOFError
    return reply, content
