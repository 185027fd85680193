"""Every route of the gateway, by concern. Handlers translate between HTTP and the hot buffer
and decide nothing else."""

from __future__ import annotations

from zombi_platform.gateway.routes.consumers import consumer_routes
from zombi_platform.gateway.routes.flush import flush_routes
from zombi_platform.gateway.routes.iceberg import iceberg_routes
from zombi_platform.gateway.routes.operations import operation_routes
from zombi_platform.gateway.routes.pipeline import pipeline_routes
from zombi_platform.gateway.routes.reads import read_routes
from zombi_platform.gateway.routes.sign_in import sign_in_routes
from zombi_platform.gateway.routes.tombstones import tombstone_routes
from zombi_platform.gateway.routes.writes import write_routes

__all__ = [
    "consumer_routes",
    "flush_routes",
    "iceberg_routes",
    "operation_routes",
    "pipeline_routes",
    "read_routes",
    "sign_in_routes",
    "tombstone_routes",
    "write_routes",
]
