"""When a table is due, and the file with thresholds of single tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zombi_platform.errors import SettingsError
from zombi_platform.gateway.thresholds import Facts, TableThresholds, Thresholds, due
from zombi_platform.settings import Settings

LIMITS = replace(
    Thresholds.of(Settings()),
    flush_interval_secs=60,
    target_file_size_mb=1,
    snapshot_threshold_files=10,
    snapshot_threshold_gb=1.0,
    snapshot_max_age_secs=60,
)
NOTHING = Facts(
    unflushed_events=0,
    unflushed_bytes=0,
    unflushed_age_secs=0,
    requested=False,
    open_cut=False,
    staged_cuts=0,
    staged_files=0,
    staged_bytes=0,
    staged_age_secs=0,
    cleanable_cuts=0,
)
FRESH = replace(NOTHING, unflushed_events=1, unflushed_bytes=100)
STAGED = replace(NOTHING, staged_cuts=1, staged_files=1)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (NOTHING, (False, False, False)),
        (replace(NOTHING, requested=True), (False, False, False)),
        (FRESH, (False, False, False)),
        (replace(FRESH, unflushed_bytes=2**20), (True, False, False)),
        (replace(FRESH, unflushed_age_secs=60), (True, False, False)),
        (replace(FRESH, requested=True), (True, False, False)),
        (replace(NOTHING, open_cut=True), (True, False, False)),
        (STAGED, (False, False, False)),
        (replace(STAGED, staged_files=10), (False, True, False)),
        (replace(STAGED, staged_bytes=2**30), (False, True, False)),
        (replace(STAGED, staged_age_secs=60), (False, True, False)),
        (replace(STAGED, requested=True), (False, True, False)),
        (replace(NOTHING, staged_age_secs=60), (False, False, False)),
        (replace(NOTHING, cleanable_cuts=1), (False, False, True)),
    ],
)
def test_what_is_due(facts: Facts, expected: tuple[bool, bool, bool]) -> None:
    found = due(facts, LIMITS)
    assert (found.cut, found.commit, found.clean) == expected
    assert bool(found.reasons) == any(expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[orders]\nflush_intervall_secs = 1", "no such threshold"),
        ("[orders]\nflush_interval_secs = 0", "at least 1"),
        ("[orders]\nflush_interval_secs = true", "whole number"),
        ("[orders]\nflush_max_segment = 99999999", "at most"),
        ("[9orders]\nflush_interval_secs = 1", "invalid table name"),
        ("flush_interval_secs = 1", "outside any table"),
        ("[orders", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    file = tmp_path / "tables.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=problem):
        TableThresholds(Settings(tables_file=file))


def test_a_file_that_breaks_later_keeps_the_values_of_before(tmp_path: Path) -> None:
    file = tmp_path / "tables.toml"
    file.write_text("[orders]\nsnapshot_threshold_gb = 0.5\nhot_retention_secs = 7\n")
    tables = TableThresholds(Settings(tables_file=file))
    assert tables.of("other") == Thresholds.of(Settings())
    assert (tables.of("orders").snapshot_threshold_gb, tables.of("orders").hot_retention_secs) == (
        0.5,
        7,
    )
    file.write_text("[orders")
    assert "not TOML" in (tables.refresh() or "")
    assert tables.refresh() is None  # told once
    assert tables.of("orders").hot_retention_secs == 7
    file.unlink()
    assert "cannot be read" in (tables.refresh() or "")
    file.write_text("[orders]\nhot_retention_secs = 8\n")
    assert tables.refresh() is None and tables.problem is None
    assert tables.of("orders").hot_retention_secs == 8
