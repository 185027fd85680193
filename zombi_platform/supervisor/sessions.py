"""Ending every process of a service, also when the supervisor itself was killed.

Each service runs in a session of its own, so whatever it started is found by the session.
Run as a program this module is the guard: it reads session ids from its standard input, and
when that ends without a word of farewell, the supervisor is dead and the guard ends those
sessions. Standard library only: the guard starts without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GUARD_TERM_SECS = 10.0
"""Between SIGTERM and SIGKILL when nobody is left to wait longer."""

POLL_SECS = 0.05
FAREWELL = "bye"
_PROC = Path("/proc")


def members(session: int) -> list[int]:
    """The living processes of a session; without /proc its leader's process group."""
    if not _PROC.is_dir():
        return [-session] if _group_lives(session) else []
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _session_of(entry) == session:
            found.append(int(entry.name))
    return found


def send(session: int, number: signal.Signals) -> None:
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session_of(entry: Path) -> int | None:
    try:
        # The name in brackets may hold anything, also blanks and brackets.
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, session = fields[0], int(fields[3])
    return None if state in b"ZX" else session


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def guard(lines: Iterable[str]) -> None:
    """Remember sessions (`+1`, `-1`) until the input ends, then end those that are left."""
    sessions: set[int] = set()
    for line in lines:
        word = line.strip()
        if word == FAREWELL:
            return
        (sessions.add if word[0] == "+" else sessions.discard)(int(word[1:]))
    deadline = time.monotonic() + GUARD_TERM_SECS
    for session in sessions:
        send(session, signal.SIGTERM)
    while any(map(members, sessions)) and time.monotonic() < deadline:
        time.sleep(POLL_SECS)
    while any(map(members, sessions)):
        for session in sessions:
            send(session, signal.SIGKILL)
        time.sleep(POLL_SECS)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
