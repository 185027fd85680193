"""Health, statistics and metrics. The health routes want no token: probes have none."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from zombi_platform.gateway.openapi import OPERATING, SIGNED_IN, errors
from zombi_platform.gateway.requests import caller
from zombi_platform.gateway.state import GatewayState

BUSY_SHARE = 0.9


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class StorageHealth(BaseModel):
    status: Literal["ok", "error"]
    error: str | None = None


class Backpressure(BaseModel):
    status: Literal["ok", "warning"]
    inflight_writes: int
    inflight_bytes: int
    max_inflight_bytes: int


class LakeReadiness(BaseModel):
    status: Literal["ok", "error", "unknown"]
    error: str | None = None


class PipelineReadiness(BaseModel):
    status: Literal["ok", "warning"]
    last_call_secs: float = Field(description="Since a worker last called, or the start.")
    error: str | None = None


class Readiness(BaseModel):
    status: Literal["ready", "not_ready"]
    hot_storage: StorageHealth
    cold_storage: LakeReadiness = Field(description="The lake, as it last answered.")
    pipeline: PipelineReadiness
    backpressure: Backpressure


class WriteStats(BaseModel):
    total: int = Field(description="Requests.")
    events_total: int
    bytes_total: int
    rate_per_sec: float
    avg_latency_us: float


class ReadStats(BaseModel):
    total: int = Field(description="Requests.")
    records_total: int
    rate_per_sec: float
    avg_latency_us: float


class HotStats(BaseModel):
    bytes: int = Field(description="Of events and idempotency keys, against the limit.")
    disk_bytes: int


class Stats(BaseModel):
    uptime_secs: float
    writes: WriteStats
    reads: ReadStats
    errors_total: int
    hot: HotStats


def operation_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(tags=[OPERATING])

    @router.get("/health", summary="Whether the process answers")
    @router.get("/health/live", summary="Liveness probe")
    async def live() -> Alive:
        return Alive()

    @router.get(
        "/health/ready",
        summary="Readiness probe",
        response_model_exclude_none=True,
        responses={503: {"model": Readiness, "description": "Writes are refused for now."}},
    )
    async def ready(response: Response) -> Readiness:
        failure = state.hot.failure
        refused = failure is not None or state.confirmation.problem is not None
        if refused:
            response.status_code = 503
        return Readiness(
            status="not_ready" if refused else "ready",
            hot_storage=StorageHealth(
                status="ok" if failure is None else "error",
                error=None if failure is None else str(failure),
            ),
            cold_storage=_cold_storage(state),
            pipeline=_pipeline(state),
            backpressure=_backpressure(state),
        )

    @router.get(
        "/stats",
        summary="Server statistics",
        responses=errors(401, 403),
        openapi_extra=SIGNED_IN,
    )
    async def stats(request: Request) -> Stats:
        caller(request, state).require("read")
        hot = {"bytes": state.hot.bytes, "disk_bytes": state.hot.disk_bytes()}
        return Stats.model_validate({**state.metrics.stats(), "hot": hot})

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **errors(401, 403),
        },
        openapi_extra=SIGNED_IN,
    )
    async def metrics(request: Request) -> Response:
        caller(request, state).require("read")
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4")

    return router


def _cold_storage(state: GatewayState) -> LakeReadiness:
    health, problem = state.pipeline.lake.health, state.confirmation.problem
    if problem is not None:
        return LakeReadiness(status="error", error=problem)
    return LakeReadiness(status=health.status, error=health.error)


def _pipeline(state: GatewayState) -> PipelineReadiness:
    silent = state.pipeline.silent_secs
    late = silent >= state.settings.pipeline_silence_secs
    return PipelineReadiness(
        status="warning" if late else "ok",
        last_call_secs=round(silent, 3),
        error=f"no pipeline has called for {silent:.0f} s: events stay hot" if late else None,
    )


def _backpressure(state: GatewayState) -> Backpressure:
    limit = state.settings.max_inflight_bytes_mb * 2**20
    return Backpressure(
        status="warning" if state.metrics.inflight_bytes >= limit * BUSY_SHARE else "ok",
        inflight_writes=state.metrics.inflight_writes,
        inflight_bytes=state.metrics.inflight_bytes,
        max_inflight_bytes=limit,
    )
