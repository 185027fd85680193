"""Which small files become one. Pure values: no pyiceberg, so they travel to engines.

Every flush leaves a file for each hour and partition it touched. Left alone, a table of many
small flushes would be slower to plan and to read with each of them. So files of one hour and
partition are merged like levels of a log-structured tree: ten of one order of magnitude
become one of the next, and an event is rewritten a few times at most.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from zombi_platform.cuts import StagedFile
from zombi_platform.settings import Settings

FILES_MAX: Final = 2000
"""Files that one merge takes at most, so that the flush after it need not wait for long."""
COMPRESSION_RATIO: Final = 8
"""How much smaller a file may be than its events: an estimate to choose by, not to rely on."""

BASE: Final = re.compile(r"/(?:snap-\d+-)?merge-(\d+)-[^/]*$")


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file of the table that the platform wrote."""

    path: str
    partition: int
    hour: int
    """Hours since 1970-01-01T00:00Z of every event in the file."""
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Files of one hour and partition that become one: what one task merges."""

    number: int
    partition: int
    hour: int
    files: tuple[LiveFile, ...]


@dataclass(frozen=True, slots=True)
class MergedFile:
    """A new file, in no snapshot yet, and those whose events it holds."""

    file: StagedFile
    replaced: tuple[LiveFile, ...]


@dataclass(frozen=True, slots=True)
class MergeLimits:
    at: int
    """Files of one kind that are merged."""
    bytes_max: int
    """Most bytes of events that become one file."""
    events_max: int

    @classmethod
    def of(cls, settings: Settings) -> MergeLimits | None:
        """None where merging is turned off."""
        if settings.merge_files_at == 0:
            return None
        return cls(
            at=max(2, settings.merge_files_at),
            bytes_max=settings.target_file_size_mb * 2**20,
            events_max=settings.flush_max_segment,
        )

    @property
    def stored_max(self) -> int:
        """Most bytes of the files that are merged into one."""
        return self.bytes_max // COMPRESSION_RATIO

    @property
    def small_max(self) -> int:
        """The size from which so many do not fit into one file."""
        return self.stored_max // self.at


def choose(files: Iterable[LiveFile], limits: MergeLimits) -> tuple[SmallFiles, ...]:
    """What to merge now, the smallest files first."""
    kinds: dict[tuple[int, int, int], list[LiveFile]] = defaultdict(list)
    for file in files:
        if file.bytes < limits.small_max:
            kinds[len(str(file.bytes)), file.hour, file.partition].append(file)
    groups: list[SmallFiles] = []
    files_left, bytes_left = FILES_MAX, limits.bytes_max
    for (_, hour, partition), alike in sorted(kinds.items()):
        fitting = _fitting(alike, limits) if len(alike) >= limits.at else ()
        files_left -= len(fitting)
        bytes_left -= sum(file.bytes for file in fitting)
        if files_left < 0 or bytes_left < 0:
            break
        if len(fitting) > 1:
            groups.append(SmallFiles(len(groups), partition, hour, fitting))
    return tuple(groups)


def merge_name(base: int) -> str:
    """How names begin that belong to a merge on top of this snapshot."""
    return f"merge-{base}-"


def base_of(location: str) -> int | None:
    """The snapshot on top of which a file may yet be committed, if it belongs to a merge."""
    match = BASE.search(location)
    return int(match[1]) if match else None


def _fitting(files: Iterable[LiveFile], limits: MergeLimits) -> tuple[LiveFile, ...]:
    """As many as fit into one file, the smallest first."""
    taken: list[LiveFile] = []
    stored = events = 0
    for file in sorted(files, key=lambda file: (file.bytes, file.path)):
        stored, events = stored + file.bytes, events + file.events
        if stored > limits.stored_max or events > limits.events_max:
            break
        taken.append(file)
    return tuple(taken)
