"""Where an engine finds the catalog: what a running gateway says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from zombi_platform.client import GatewayClient
from zombi_platform.client.calls import decode

Warehouse = Literal["lake", "live"]


@dataclass(frozen=True, slots=True)
class Place:
    """A warehouse of a gateway, with what its clients need besides credentials of their own."""

    url: str
    warehouse: Warehouse
    namespace: str
    storage: Mapping[str, str]
    """Where the bucket is, by Iceberg's names; empty for a local disk."""


class _Config(msgspec.Struct):
    defaults: dict[str, str]


class _Namespaces(msgspec.Struct):
    namespaces: list[list[str]]


def find_place(client: GatewayClient, warehouse: Warehouse) -> Place:
    answer = client.request("GET", "/v1/config", params={"warehouse": warehouse})
    config = decode(answer, _Config)
    found = decode(client.request("GET", f"/v1/{warehouse}/namespaces"), _Namespaces)
    return Place(client.url, warehouse, found.namespaces[0][0], config.defaults)
