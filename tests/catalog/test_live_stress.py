"""A short run of the stress; `python -m tests.catalog.stress` runs it for five minutes."""

from __future__ import annotations

import pytest

from tests.catalog.stress import stress
from tests.spark import SparkServer


def test_live_answers_are_right_while_events_move() -> None:
    tally = stress(6, phase_secs=3)
    assert not tally.wrong, tally.wrong
    assert tally.flushes
    assert min(tally.queries.values()) > 1


@pytest.mark.integration
def test_live_answers_are_right_while_spark_compacts(spark_server: SparkServer) -> None:
    tally = stress(40, spark=spark_server)
    assert not tally.wrong, tally.wrong
    assert tally.compactions
    assert tally.queries["spark"] > 1
