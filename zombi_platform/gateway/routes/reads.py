"""Tables, watermarks and events of the hot buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from zombi_platform.errors import InvalidRequestError, NotAcceptableError
from zombi_platform.events import COLUMNS, SEQUENCE_MAX, TIMESTAMP_MS_MAX, check_table
from zombi_platform.gateway.decoding import ARROW
from zombi_platform.gateway.lake_view import Seen
from zombi_platform.gateway.openapi import READING, SIGNED_IN, errors
from zombi_platform.gateway.reads import (
    ARROW_LIMIT_MAX,
    JSON_LIMIT_MAX,
    arrow_chunks,
    json_page,
    parse_fields,
    slices,
)
from zombi_platform.gateway.requests import caller
from zombi_platform.gateway.routes.parameters import PartitionNumber, TableName
from zombi_platform.gateway.state import GatewayState
from zombi_platform.hot.buffer import Reading
from zombi_platform.progress import FailureReport

ARROW_TYPE: Final = ARROW.decode()
HAS_MORE: Final = "X-Zombi-Has-More"


class Table(BaseModel):
    table: str
    partitions: int
    events: int = Field(description="Events in the hot buffer.")
    bytes: int
    oldest_unflushed_secs: float | None = Field(
        description="Age of the oldest event that is not in Iceberg yet."
    )


class Tables(BaseModel):
    tables: list[Table]


class PartitionWatermarks(BaseModel):
    high_watermark: int = Field(description="Last sequence given out.")
    flush_watermark: int = Field(description="Every sequence up to here is in Iceberg.")
    cleanup_watermark: int = Field(description="Every sequence up to here is deleted here.")


class LakeWatermarks(BaseModel):
    snapshot_id: int | None
    metadata_location: str
    watermarks: dict[str, int] = Field(description="By partition number.")


class TableWatermarks(BaseModel):
    table: str
    partitions: dict[str, PartitionWatermarks] = Field(description="By partition number.")
    lake: LakeWatermarks | None = Field(
        default=None, description="What the catalog says; none if it does not have the table."
    )
    lake_error: str | None = Field(
        default=None, description="Why the catalog could not be asked; `lake` is older then."
    )
    failure: FailureReport | None = Field(
        default=None, description="What stopped the last run of the pipeline."
    )


class Record(BaseModel):
    """An event. A payload that is not UTF-8 comes as `payload_base64`."""

    sequence: int | None = None
    partition: int | None = None
    payload: str | None = None
    payload_base64: str | None = None
    timestamp_ms: int | None = None
    idempotency_key: str | None = None
    headers: dict[str, str] | None = None


class Page(BaseModel):
    records: list[Record]
    count: int
    has_more: bool


_EVENTS: Final[dict[str, Any]] = {
    "description": "Events, as many as asked for or fewer.",
    "headers": {
        HAS_MORE: {
            "description": "Whether there are more events; with Arrow only.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        }
    },
    "model": Page,
    "content": {ARROW_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


def read_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(tags=[READING])

    @router.get(
        "/tables",
        summary="List tables",
        description="Those that the token may read.",
        responses=errors(401, 403),
        openapi_extra=SIGNED_IN,
    )
    async def list_tables(request: Request) -> Tables:
        who = caller(request, state)
        who.require("read")
        found = [table for table in state.hot.tables() if who.may("read", table.table)]
        return Tables(tables=[Table(**asdict(table)) for table in found])

    @router.get(
        "/tables/{table}/watermark",
        summary="How far each partition has come",
        responses=errors(400, 401, 403, 404),
        openapi_extra=SIGNED_IN,
    )
    async def watermark(request: Request, table: TableName) -> TableWatermarks:
        caller(request, state).require("read", check_table(table))
        marks = state.hot.watermarks(table).items()
        found = {str(number): PartitionWatermarks(**asdict(mark)) for number, mark in marks}
        error = await state.pipeline.lake.look(table)
        seen = state.pipeline.lake.seen.get(table)
        return TableWatermarks(
            table=table,
            partitions=found,
            lake=None if seen is None else _lake_watermarks(seen),
            lake_error=error,
            failure=state.pipeline.failure(table),
        )

    @router.get(
        "/tables/{table}",
        summary="Read hot events",
        description="With a partition, in sequence order from `offset`; without, all "
        "partitions by timestamp, partition and sequence. Choose the format by `Accept`.",
        response_class=Response,
        responses={200: _EVENTS, **errors(400, 401, 403, 404, 406, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def read_events(
        request: Request,
        table: TableName,
        partition: PartitionNumber | None = None,
        offset: Annotated[
            int, Query(ge=0, le=SEQUENCE_MAX, description="First sequence to read.")
        ] = 0,
        limit: Annotated[
            int,
            Query(
                ge=1,
                le=ARROW_LIMIT_MAX,
                description=f"At most {JSON_LIMIT_MAX} for JSON, {ARROW_LIMIT_MAX} for Arrow.",
            ),
        ] = 100,
        since: Annotated[
            int | None,
            Query(ge=0, le=TIMESTAMP_MS_MAX, description="Only events from this time, in ms, on."),
        ] = None,
        fields: Annotated[
            str | None,
            Query(description=f"Columns, by comma; there are {', '.join(COLUMNS.names)}."),
        ] = None,
    ) -> Response:
        started = time.perf_counter()
        caller(request, state).require("read", check_table(table))
        arrow = _wants_arrow(request)
        if not arrow and limit > JSON_LIMIT_MAX:
            raise InvalidRequestError(
                f"limit {limit} is over {JSON_LIMIT_MAX} for JSON; read more as {ARROW_TYPE}"
            )
        names = parse_fields(fields)
        state.open_reads.enter()
        try:
            reading = await _in_thread(
                state, state.hot.reading, table, partition, offset, limit, since
            )
            page = None if arrow else await _in_thread(state, json_page, reading, names)
        except BaseException:
            state.open_reads.leave()
            raise
        if page is None:
            more = {HAS_MORE: "true" if reading.has_more else "false"}
            return OpenResponse(state, _stream(state, reading, names, started), more, ARROW_TYPE)
        state.metrics.did_read(page.count, time.perf_counter() - started)
        size = {"Content-Length": str(len(page.body))}
        return OpenResponse(state, _slices(page.body), size, "application/json")

    return router


def _lake_watermarks(seen: Seen) -> LakeWatermarks:
    marks = {str(number): mark for number, mark in seen.watermarks.items()}
    return LakeWatermarks(
        snapshot_id=seen.snapshot_id, metadata_location=seen.metadata_location, watermarks=marks
    )


class OpenResponse(StreamingResponse):
    """An answer that counts as an open read until its reader has it, or is gone."""

    def __init__(
        self,
        state: GatewayState,
        content: AsyncIterator[memoryview],
        headers: dict[str, str],
        media_type: str,
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._state.open_reads.leave()


async def _stream(
    state: GatewayState, reading: Reading, names: list[str], started: float
) -> AsyncIterator[memoryview]:
    pieces, count = arrow_chunks(reading, names), 0
    while piece := await _in_thread(state, next, pieces, None):
        count += piece[1]
        for part in slices(piece[0]):
            yield part
    state.metrics.did_read(count, time.perf_counter() - started)


async def _slices(body: bytes) -> AsyncIterator[memoryview]:
    for part in slices(body):
        yield part


async def _in_thread(state: GatewayState, work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(state.readers, work, *args)


def _wants_arrow(request: Request) -> bool:
    accept = request.headers.get("accept", "*/*")
    wanted = [part.split(";")[0].strip().lower() for part in accept.split(",")]
    if ARROW_TYPE in wanted:
        return True
    if any(part in ("*/*", "application/*", "application/json", "") for part in wanted):
        return False
    raise NotAcceptableError(
        f"{accept[:80]!r} is not given: ask for application/json or {ARROW_TYPE}"
    )
