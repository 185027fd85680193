"""What the routes and the fast lane share, made once when the gateway starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from zombi_platform.catalog.live.warehouse import LiveWarehouse
from zombi_platform.catalog.warehouse import LakeWarehouse
from zombi_platform.gateway.access import Access
from zombi_platform.gateway.bodies import Arriving
from zombi_platform.gateway.confirmation import Confirmation
from zombi_platform.gateway.metrics import Metrics
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.gateway.reads import OpenReads
from zombi_platform.gateway.writes import Writes
from zombi_platform.hot import HotBuffer
from zombi_platform.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewayState:
    settings: Settings
    access: Access
    metrics: Metrics
    hot: HotBuffer
    writes: Writes
    lake: LakeWarehouse
    live: LiveWarehouse
    pipeline: Pipeline
    confirmation: Confirmation
    arriving: Arriving
    open_reads: OpenReads
    readers: ThreadPoolExecutor
    """Threads in which the hot buffer is read; their number bounds reads at once."""
