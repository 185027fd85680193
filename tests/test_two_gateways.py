"""Two gateways that write one partition of one table by mistake: one is refused, none loses."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway import Gateway, running
from zombi_platform.errors import LakeConflictError, ZombiError
from zombi_platform.pipeline import Pipeline
from zombi_platform.settings import Settings


def send(gateway: Gateway, name: str, count: int) -> list[int]:
    records = [{"payload": f"{name}-{number}"} for number in range(count)]
    answer = httpx.post(f"{gateway.url}/tables/t/bulk", json={"records": records})
    assert answer.status_code == 202, answer.text
    return list(answer.json()["offsets"])


def flush(gateway: Gateway, lake: Path) -> None:
    settings = Settings(url=gateway.url, warehouse=str(lake), engine="arrow")
    with Pipeline.opened(settings) as pipeline:
        pipeline.flush("t")


def hot_events(gateway: Gateway) -> list[str]:
    page = httpx.get(f"{gateway.url}/tables/t", params={"offset": 1, "limit": 100}).json()
    return [record["payload"] for record in page["records"]]


def test_the_same_range_of_another_gateway_is_not_taken_for_ours(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    with (
        running(tmp_path / "one", warehouse=str(lake)) as one,
        running(tmp_path / "two", warehouse=str(lake)) as two,
    ):
        send(one, "before", 10)
        flush(one, lake)
        assert send(two, "theirs", 5) == send(one, "ours", 5) == [11, 12, 13, 14, 15]
        flush(one, lake)
        with pytest.raises(LakeConflictError) as refused:
            flush(two, lake)
        assert refused.value.code == "FENCE_MISMATCH"
        assert hot_events(two) == [f"theirs-{number}" for number in range(5)]
        # The one that was first goes on.
        send(one, "after", 5)
        flush(one, lake)
        with pytest.raises(LakeConflictError):
            flush(two, lake)
        assert len(hot_events(two)) == 5
    # A start looks lost outcomes up in the lake; this one is not its own.
    with running(tmp_path / "two", warehouse=str(lake)) as two:
        with pytest.raises(ZombiError) as stopped:
            flush(two, lake)
        assert stopped.value.code == "FENCE_MISMATCH"
        assert hot_events(two) == [f"theirs-{number}" for number in range(5)]
