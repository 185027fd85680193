"""The catalogs and stores that one behaviour suite runs over."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.lake.staging import Tombstones
from zombi_platform.cuts import Cut
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

RACING = [
    "filesystem-disk",
    "sql",
    pytest.param("filesystem-versitygw", marks=pytest.mark.integration),
    pytest.param("rest", marks=pytest.mark.integration),
]
"""Catalogs that can be raced here. moto looks whether a key exists and then stores it, with
other requests in between, and its Glue ignores the version that a commit names."""

EVERYWHERE = ["filesystem-moto", *RACING, pytest.param("glue", marks=pytest.mark.integration)]


@dataclass(frozen=True)
class World:
    """One lake that several workers can open."""

    name: str
    settings: Settings

    def worker(self, **changes: object) -> Lake:
        """A lake as a process of its own would open it."""
        return Lake(replace(self.settings, **changes))  # type: ignore[arg-type]


def make_world(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> World:
    settings = Settings(data_dir=tmp_path, s3_retry_initial_ms=1)
    if name in ("filesystem-moto", "filesystem-versitygw"):
        request.getfixturevalue("credentials")
        server = request.getfixturevalue(name.removeprefix("filesystem-"))
        settings = replace(settings, s3_bucket=server.bucket(), s3_endpoint=server.endpoint)
    elif name == "glue":
        request.getfixturevalue("credentials")
        server = request.getfixturevalue("moto")
        # boto3 takes the endpoint of a service from the environment.
        request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL_GLUE", server.endpoint)
        settings = replace(
            settings,
            catalog="glue",
            catalog_namespace=f"n{uuid.uuid4().hex[:8]}",
            s3_bucket=server.bucket(),
            s3_endpoint=server.endpoint,
        )
    elif name == "sql":
        settings = replace(settings, catalog="sql", catalog_uri=f"sqlite:///{tmp_path}/catalog.db")
    elif name == "rest":
        server = request.getfixturevalue("rest_server")
        settings = replace(
            settings,
            catalog="rest",
            catalog_uri=server.url,
            catalog_namespace=f"n{uuid.uuid4().hex[:8]}",
        )
    return World(name, settings)


def put(lake: Lake, *cuts: Cut) -> int:
    """Commit and say how many events that added."""
    return lake.commit(cuts[0].table, cuts, before_write=Tombstones()).events


def rows(lake: Lake, table: str = "orders") -> list[tuple[int, int]]:
    """Every (partition, sequence) that a reader sees, sorted."""
    loaded = lake.load(table)
    assert loaded is not None
    found = loaded[0].scan(selected_fields=("partition", "sequence")).to_arrow()
    return sorted(zip(found["partition"].to_pylist(), found["sequence"].to_pylist(), strict=True))
