"""A table in the lake as anybody may ask: flush it, and where its metadata is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from zombi_platform.errors import NotFoundError
from zombi_platform.events import check_table
from zombi_platform.gateway.openapi import MOVING, READING, SIGNED_IN, errors
from zombi_platform.gateway.requests import caller
from zombi_platform.gateway.routes.parameters import TableName
from zombi_platform.gateway.routes.pipeline import to_json
from zombi_platform.gateway.state import GatewayState
from zombi_platform.progress import FlushAnswer

WAIT_SECS_MAX: Final = 3600


@dataclass(frozen=True, slots=True)
class TableMetadata:
    table: str
    uuid: str
    location: str
    metadata_location: str
    snapshot_id: int | None
    watermarks: dict[int, int]
    """Of each partition: every sequence up to here is in the table."""


def flush_routes(state: GatewayState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tables/{table}/flush",
        tags=[MOVING],
        summary="Have everything acked so far committed to Iceberg",
        description="The request is durable. 200 when it is done, 202 when the time to wait is "
        "up, 503 `NO_PIPELINE` when nobody has been working for a while.",
        response_class=Response,
        responses={
            200: {"model": FlushAnswer},
            202: {"model": FlushAnswer, "description": "Still going on."},
            **errors(400, 401, 403, 404, 503),
        },
        openapi_extra=SIGNED_IN,
    )
    async def flush(
        request: Request,
        table: TableName,
        wait_secs: Annotated[
            float, Query(ge=0, le=WAIT_SECS_MAX, description="Seconds to wait for it.")
        ] = 30,
    ) -> Response:
        caller(request, state).require("pipeline", check_table(table))
        answer = await state.pipeline.flush(table, wait_secs)
        response = to_json(answer)
        response.status_code = 200 if answer.status == "flushed" else 202
        return response

    @router.get(
        "/tables/{table}/metadata",
        tags=[READING],
        summary="Where the table's Iceberg metadata is",
        response_class=Response,
        responses={200: {"model": TableMetadata}, **errors(400, 401, 403, 404, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def metadata(request: Request, table: TableName) -> Response:
        caller(request, state).require("read", check_table(table))
        found = await state.pipeline.lake.state(table)
        if found is None:
            raise NotFoundError(
                f"table {table!r} is not in Iceberg yet; it comes there with its first commit",
                code="TABLE_NOT_FOUND",
            )
        return to_json(
            TableMetadata(
                table=table,
                uuid=found.uuid,
                location=found.location,
                metadata_location=found.metadata_location,
                snapshot_id=found.snapshot_id,
                watermarks=dict(found.watermarks),
            )
        )

    return router
