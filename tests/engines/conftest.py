"""Engines under test; Spark runs as one warm server for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.staging import Staging
from tests.gateway import running
from tests.spark import SparkServer
from zombi_platform.engines import Engine
from zombi_platform.engines.arrow import ArrowEngine

# The first of Spark's tests also starts the server, which takes a while on a busy machine.
ON_SPARK = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(params=["arrow", pytest.param("spark", marks=ON_SPARK)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "arrow":
        yield ArrowEngine(concurrency=2)
        return
    from zombi_platform.engines.spark.engine import SparkEngine
    from zombi_platform.engines.spark.session import Connection

    server: SparkServer = request.getfixturevalue("spark_server")
    spark = SparkEngine(Connection(server.remote, ship_code=False))
    yield spark
    spark.close()


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    """A gateway whose cuts have many small splits, and a lake beside it."""
    with (
        running(tmp_path / "data", flush_max_segment="500") as gateway,
        Staging(gateway, tmp_path / "lake") as staging,
    ):
        yield staging
