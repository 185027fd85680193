"""When a table is due: for a cut, a commit, a cleaning. Pure, but for reading one file.

Thresholds come from the settings and, for single tables, from a TOML file whose tables are
named like ours. A file with anything unknown in it is refused at the start; later, a broken
file keeps the values of before, and the problem is shown.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from zombi_platform.errors import SettingsError, ZombiError
from zombi_platform.events import check_table
from zombi_platform.settings import Settings

FILE_BYTES_MAX: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Thresholds:
    flush_interval_secs: int
    target_file_size_mb: int
    flush_max_segment: int
    snapshot_threshold_files: int
    snapshot_threshold_gb: float
    snapshot_max_age_secs: int
    hot_retention_secs: int

    @staticmethod
    def of(settings: Settings) -> Thresholds:
        return Thresholds(**{name: getattr(settings, name) for name in _NAMES})


_NAMES: Final = tuple(spec.name for spec in fields(Thresholds))


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a table is where."""

    unflushed_events: int
    unflushed_bytes: int
    unflushed_age_secs: float
    requested: bool
    open_cut: bool
    staged_cuts: int
    staged_files: int
    staged_bytes: int
    staged_age_secs: float
    cleanable_cuts: int


@dataclass(frozen=True, slots=True)
class Due:
    cut: bool
    commit: bool
    clean: bool
    reasons: tuple[str, ...]


def due(facts: Facts, limits: Thresholds) -> Due:
    cut = _cut_reasons(facts, limits)
    commit = _commit_reasons(facts, limits) if facts.staged_cuts else []
    clean = [f"{facts.cleanable_cuts} committed cuts to clean"] if facts.cleanable_cuts else []
    return Due(bool(cut), bool(commit), bool(clean), (*cut, *commit, *clean))


def _cut_reasons(facts: Facts, limits: Thresholds) -> list[str]:
    if facts.open_cut:
        return ["a cut is open"]
    if not facts.unflushed_events:
        return []
    reasons = []
    if facts.unflushed_bytes >= limits.target_file_size_mb * 2**20:
        reasons.append(f"{facts.unflushed_bytes >> 20} MB are not in Iceberg")
    if facts.unflushed_age_secs >= limits.flush_interval_secs:
        reasons.append(f"the oldest event has waited {facts.unflushed_age_secs:.0f} s")
    if facts.requested:
        reasons.append("a flush was requested")
    return reasons


def _commit_reasons(facts: Facts, limits: Thresholds) -> list[str]:
    reasons = []
    if facts.staged_files >= limits.snapshot_threshold_files:
        reasons.append(f"{facts.staged_files} files are staged")
    if facts.staged_bytes >= limits.snapshot_threshold_gb * 2**30:
        reasons.append(f"{facts.staged_bytes >> 20} MB are staged")
    if facts.staged_age_secs >= limits.snapshot_max_age_secs:
        reasons.append(f"the oldest staged event has waited {facts.staged_age_secs:.0f} s")
    if facts.requested:
        reasons.append("a commit was requested")
    return reasons


class TableThresholds:
    """The thresholds of each table; `refresh` follows the file."""

    def __init__(self, settings: Settings) -> None:
        self._default = Thresholds.of(settings)
        self._file = settings.tables_file
        self._tables: Mapping[str, Thresholds] = {}
        self._signature: tuple[int, int, int] | None = None
        self.problem: str | None = None
        if self._file is not None:
            self._read(self._file)

    def of(self, table: str) -> Thresholds:
        return self._tables.get(table, self._default)

    def refresh(self) -> str | None:
        """Reread the file if it changed; return a problem to log when there is a new one."""
        if self._file is None:
            return None
        before = self.problem
        try:
            if _signature(self._file) != self._signature:
                self._read(self._file)
                self.problem = None
        except ZombiError as error:
            self.problem = f"{error}; the values of before stay"
        return self.problem if self.problem != before else None

    def _read(self, file: Path) -> None:
        signature = _signature(file)
        self._tables = parse_tables(file, self._default)
        self._signature = signature


def parse_tables(file: Path, default: Thresholds) -> dict[str, Thresholds]:
    """The file's tables; raises SettingsError with everything that is wrong in it."""
    try:
        text = file.read_bytes()
        if len(text) > FILE_BYTES_MAX:
            raise SettingsError(f"{_named(file)} is larger than {FILE_BYTES_MAX} bytes")
        document = tomllib.loads(text.decode())
    except OSError as error:
        raise SettingsError(f"{_named(file)} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{_named(file)} is not TOML: {error}") from error
    problems: list[str] = []
    found = {name: _parse(name, values, default, problems) for name, values in document.items()}
    if problems:
        raise SettingsError(f"{_named(file)}: {'; '.join(problems)}")
    return found


def _parse(name: str, values: Any, default: Thresholds, problems: list[str]) -> Thresholds:
    try:
        check_table(name)
    except ZombiError as error:
        problems.append(str(error))
    if not isinstance(values, dict):
        problems.append(f"{name} is outside any table: write it below a line like [orders]")
        return default
    for key, value in values.items():
        problem = _problem(key, value)
        if problem is not None:
            problems.append(f"[{name}] {key} = {value!r}: {problem}")
    known = {key: value for key, value in values.items() if key in _NAMES}
    return replace(default, **known)


def _problem(key: str, value: Any) -> str | None:
    """What is wrong with a value, by the bounds that the setting of its name has."""
    if key not in _NAMES:
        return f"there is no such threshold; there are {', '.join(_NAMES)}"
    spec = next(spec for spec in fields(Settings) if spec.name == key)
    whole = isinstance(spec.default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return "must be a whole number" if whole else "must be a number"
    low, high = spec.metadata["low"], spec.metadata["high"]
    if not (low is None or value >= low):
        return f"must be at least {low:g}"
    if not (high is None or value <= high):
        return f"must be at most {high:g}"
    return None


def _signature(file: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(file)
    except OSError as error:
        raise SettingsError(f"{_named(file)} cannot be read: {error.strerror}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def _named(file: Path) -> str:
    return f"ZOMBI_TABLES_FILE {file}"
