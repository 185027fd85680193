"""Committed tables for tests of the catalog, made by the lake's own commit."""

from __future__ import annotations

from pathlib import Path

import httpx
from pyiceberg.catalog.rest import RestCatalog

from tests.gateway import Gateway
from tests.lake.staging import HOUR, Tombstones, stage
from zombi_platform.cuts import Range
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

HOURS = 3
EVENTS = 10
HTTP = httpx.Client(timeout=60)
"""More patient than httpx's own calls: machines that run tests are busy."""


def commit_hours(data_dir: Path, table: str = "orders", hours: int = HOURS) -> Lake:
    """A table of one partition with a snapshot of ten events for each hour."""
    lake = Lake(Settings(data_dir=data_dir))
    for number in range(hours):
        part = Range(0, number * EVENTS + 1, (number + 1) * EVENTS)
        cut = stage(lake.storage, table, number + 1, part, hour=HOUR + number)
        lake.commit(table, [cut], before_write=Tombstones())
    return lake


def rest_catalog(gateway: Gateway, warehouse: str = "lake", **options: str) -> RestCatalog:
    return RestCatalog("zombi", uri=gateway.url, warehouse=warehouse, **options)


def table_url(gateway: Gateway, table: str = "orders", warehouse: str = "lake") -> str:
    return f"{gateway.url}/v1/{warehouse}/namespaces/zombi/tables/{table}"


def iceberg_error(response: httpx.Response) -> tuple[int, str]:
    """Status and type of an error in Iceberg's shape."""
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert error["message"]
    return response.status_code, error["type"]
