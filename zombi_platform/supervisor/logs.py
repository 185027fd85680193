"""What services print: on the terminal behind a coloured name, and in a file of bounded size."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A file that reaches it becomes `.log.1`; the one before that is dropped."""

LINES_REMEMBERED: Final = 20
_COLOURS: Final = (36, 35, 33, 32, 34, 31)
_ESCAPES: Final = re.compile(rb"\x1b\[[0-9;]*m")


class ServiceLog:
    def __init__(self, path: Path, name: str, number: int, width: int) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab")
        self._size = self._file.tell()
        self._prefix = _prefix(name.ljust(width), number)
        self.last: deque[str] = deque(maxlen=LINES_REMEMBERED)

    def write(self, line: bytes) -> None:
        plain = _ESCAPES.sub(b"", line)
        self.last.append(plain.decode(errors="replace"))
        self._keep(plain + b"\n")
        sys.stdout.buffer.write(self._prefix + (line if _coloured() else plain) + b"\n")
        sys.stdout.buffer.flush()

    def close(self) -> None:
        self._file.close()

    def _keep(self, line: bytes) -> None:
        if self._size + len(line) > FILE_BYTES_MAX:
            self._file.close()
            os.replace(self._path, self._path.with_suffix(".log.1"))
            self._file = self._path.open("ab")
            self._size = 0
        self._file.write(line)
        self._file.flush()
        self._size += len(line)


def _prefix(name: str, number: int) -> bytes:
    if not _coloured():
        return f"{name} | ".encode()
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{name} |\x1b[0m ".encode()


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
