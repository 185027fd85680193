"""How other processes and Python programs talk to the gateway.

`Producer` sends events, `GatewayClient` calls the routes, `Tail` follows a table,
`PipelineClient` moves tables to Iceberg. They know
the gateway's HTTP interface and nothing of its inside. Names are loaded when first used,
because the producer's Arrow costs a command that only reads half of its start-up time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zombi_platform.client.batch import Placed
    from zombi_platform.client.calls import Event, GatewayClient, TableInfo
    from zombi_platform.client.pipeline import PipelineClient
    from zombi_platform.client.producer import Producer, Receipt
    from zombi_platform.client.tail import Tail

__all__ = [
    "Event",
    "GatewayClient",
    "PipelineClient",
    "Placed",
    "Producer",
    "Receipt",
    "TableInfo",
    "Tail",
]

_MODULES = {
    "Event": "calls",
    "GatewayClient": "calls",
    "TableInfo": "calls",
    "PipelineClient": "pipeline",
    "Placed": "batch",
    "Producer": "producer",
    "Receipt": "producer",
    "Tail": "tail",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
