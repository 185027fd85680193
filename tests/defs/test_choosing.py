"""Which tables a tick starts runs for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zombi_platform.defs.choosing import Failures, Memory, Observed, choose, observe, recall
from zombi_platform.progress import FailureReport, LeaseProgress, TableProgress

NOW_MS = 1_800_000_000_000

IDLE = TableProgress(
    table="orders",
    events=0,
    bytes=0,
    oldest_age_secs=None,
    unflushed_events=0,
    unflushed_bytes=0,
    cuts=(),
    cut_due=False,
    commit_due=False,
    clean_due=False,
    reasons=(),
    requested=False,
    tombstones_due=0,
    lease=None,
    failure=None,
    watermarks={},
    lag_secs=0.0,
    registration=None,
    lake=None,
)


def table(name: str = "orders", **changes: Any) -> TableProgress:
    return replace(IDLE, table=name, **changes)


def failed(secs_ago: float, *, transient: bool) -> FailureReport:
    return FailureReport("it broke", "BROKEN", "stage", transient, NOW_MS - int(secs_ago * 1000))


def chosen(*tables: TableProgress, busy: tuple[str, ...] = (), failures: int = 1) -> list[str]:
    known = {t.table: Failures(failures, t.failure.at_ms) for t in tables if t.failure is not None}
    return [t.table for t in choose(tables, known, busy, NOW_MS)]


def test_only_what_is_due() -> None:
    assert chosen(table()) == []
    assert chosen(table(cut_due=True)) == ["orders"]
    assert chosen(table(commit_due=True)) == ["orders"]
    assert chosen(table(clean_due=True)) == ["orders"]
    assert chosen(table(tombstones_due=1)) == []
    assert chosen(table(tombstones_due=100)) == ["orders"]


def test_not_while_somebody_is_at_it() -> None:
    assert chosen(table(cut_due=True), busy=("orders",)) == []
    assert chosen(table(cut_due=True, lease=LeaseProgress("cli", 3, 20.0))) == []


def test_a_transient_fault_is_tried_again_ever_more_slowly() -> None:
    def tried(secs_ago: float, failures: int) -> bool:
        fault = failed(secs_ago, transient=True)
        return bool(chosen(table(cut_due=True, failure=fault), failures=failures))

    assert not tried(9, failures=1)
    assert tried(11, failures=1)
    assert not tried(11, failures=2)
    assert tried(21, failures=2)
    assert not tried(590, failures=50)
    assert tried(601, failures=50)


def test_a_permanent_fault_waits_for_a_request_and_stops_nobody_else() -> None:
    broken = table("broken", cut_due=True, failure=failed(86_400, transient=False))
    assert chosen(broken, table("sound", cut_due=True)) == ["sound"]
    assert chosen(replace(broken, requested=True)) == ["broken"]
    just_failed = replace(broken, requested=True, failure=failed(5, transient=False))
    assert chosen(just_failed) == []


def test_failures_in_a_row_are_counted_until_the_table_recovers() -> None:
    memory = Memory()
    first = table(failure=failed(30, transient=True))
    second = table(failure=failed(10, transient=True))
    for tick, count in [(first, 1), (first, 1), (second, 2)]:
        memory = Memory(recall(memory, [tick]), {})
        assert memory.failures["orders"].count == count
    assert recall(memory, [table()]) == {}


def test_memory_survives_the_cursor() -> None:
    memory = Memory({"a": Failures(2, 5)}, {"b": Observed(7, 9)})
    assert Memory.read(memory.write()) == memory
    assert Memory.read(None) == Memory()


def test_depth_is_shown_once_in_a_while_and_when_it_changed() -> None:
    def shown(seen: Observed | None, progress: TableProgress) -> bool:
        memory = Memory({}, {} if seen is None else {"orders": seen})
        return bool(observe(memory, [progress], NOW_MS))

    assert shown(None, table())
    assert not shown(Observed(NOW_MS - 59_000, 1), table(events=2))
    assert shown(Observed(NOW_MS - 60_000, 1), table(events=2))
    assert not shown(Observed(NOW_MS - 60_000, 0), table(events=0))
    assert shown(Observed(NOW_MS - 60_000, 3), table(events=3, unflushed_events=3))
