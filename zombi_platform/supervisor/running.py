"""Who holds a data directory: a lock that dies with its holder, and what the holder runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from zombi_platform.errors import StartupError


class HomeLock:
    """Held by one `zombi up`; the file tells a second one what is running."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(home / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(self.fd, 64 * 1024, 0)
            os.close(self.fd)
            raise StartupError(_describe(home, text)) from None
        self.tell({})

    def tell(self, addresses: Mapping[str, str]) -> None:
        """Record what runs where."""
        text = json.dumps({"pid": os.getpid(), "services": dict(addresses)}).encode()
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text, 0)

    def close(self) -> None:
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


def _describe(home: Path, text: bytes) -> str:
    try:
        known = json.loads(text)
    except ValueError:
        return f"another `zombi up` on {home} is starting or stopping; try again in a moment"
    lines = [f"`zombi up` runs already on {home} as process {known['pid']}:"]
    lines += [f"  {name:<8} {address}" for name, address in known["services"].items()]
    lines.append("stop it with Ctrl-C there, or set ZOMBI_DATA_DIR for a second one")
    return "\n".join(lines)
