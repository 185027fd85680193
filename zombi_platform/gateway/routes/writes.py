"""The write routes as FastAPI serves them; `fast_lane` serves plain writes ahead of these.

Both share `Writes`, so they answer alike. The bodies are decoded by hand, in one go, so
their shapes are written out here for the OpenAPI document.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from zombi_platform.events import (
    HEADERS_MAX,
    IDEMPOTENCY_KEY_BYTES_MAX,
    PARTITION_MAX,
    SEQUENCE_MAX,
    TIMESTAMP_MS_MAX,
    TIMESTAMP_MS_MIN,
    check_table,
)
from zombi_platform.gateway.decoding import ARROW, JSON, NDJSON, PROTOBUF
from zombi_platform.gateway.openapi import SIGNED_IN, WRITING, errors
from zombi_platform.gateway.requests import caller, read_body, to_response
from zombi_platform.gateway.routes.parameters import TableName
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.writes import Answer, WriteRequest


class Written(BaseModel):
    """Where the event is. A key that was seen before gives the first event's offset."""

    offset: int = Field(ge=1, le=SEQUENCE_MAX)
    partition: int = Field(ge=0, le=PARTITION_MAX)
    table: str


class BulkWritten(BaseModel):
    """Offsets in the order of the records."""

    offsets: list[int]
    count: int
    table: str


class OffsetRange(BaseModel):
    first: int = Field(ge=1, le=SEQUENCE_MAX)
    last: int = Field(ge=1, le=SEQUENCE_MAX)


class BulkSummary(BaseModel):
    """The short answer, with `Prefer: return=minimal`: offsets by partition number."""

    count: int
    table: str
    partitions: dict[str, OffsetRange]


def write_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(tags=[WRITING])
    refusals = errors(400, 401, 403, 408, 413, 415, 503)

    @router.post(
        "/tables/{table}",
        status_code=202,
        summary="Write one event",
        description="Durable before the answer. Repeat it with the same `idempotency_key` as "
        "often as you like: it is one event.",
        response_class=Response,
        responses={202: {"model": Written, "description": "Durable."}, **refusals},
        openapi_extra={**SIGNED_IN, **_SINGLE},
    )
    async def write_event(request: Request, table: TableName) -> Response:
        return await _write(state, request, table, bulk=False)

    @router.post(
        "/tables/{table}/bulk",
        status_code=202,
        summary="Write many events, all or none",
        description="One bad record refuses the whole request, and the error names it by index.",
        response_class=Response,
        responses={
            202: {"model": BulkWritten | BulkSummary, "description": "All durable."},
            **refusals,
        },
        openapi_extra={**SIGNED_IN, **_BULK},
    )
    async def write_events(request: Request, table: TableName) -> Response:
        return await _write(state, request, table, bulk=True)

    return router


async def _write(state: GatewayState, request: Request, table: str, *, bulk: bool) -> Response:
    principal = caller(request, state)
    write = WriteRequest.of(check_table(table), bulk, request.headers.raw)
    body = await read_body(request, state, state.writes.body_limit)
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def done(answer: Answer) -> None:
        if not answered.done():
            answered.set_result(answer)

    state.writes.submit(write, body, principal, done)
    return to_response(await answered)


_RECORD: Final[dict[str, Any]] = {
    "type": "object",
    "description": "One event, with exactly one of `payload` and `payload_base64`.",
    "oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}],
    "properties": {
        "payload": {"type": "string", "description": "Text."},
        "payload_base64": {
            "type": "string",
            "contentEncoding": "base64",
            "description": "Bytes in base64, for a payload that is not text.",
        },
        "partition": {"type": "integer", "minimum": 0, "maximum": PARTITION_MAX, "default": 0},
        "timestamp_ms": {
            "type": ["integer", "null"],
            "minimum": TIMESTAMP_MS_MIN,
            "maximum": TIMESTAMP_MS_MAX,
            "description": "Milliseconds since 1970; without it, the time of arrival.",
        },
        "idempotency_key": {
            "type": ["string", "null"],
            "maxLength": IDEMPOTENCY_KEY_BYTES_MAX,
            "description": f"At most {IDEMPOTENCY_KEY_BYTES_MAX} bytes in UTF-8.",
        },
        "headers": {
            "type": ["object", "null"],
            "maxProperties": HEADERS_MAX,
            "additionalProperties": {"type": "string"},
            "description": "Kept with the event.",
        },
    },
    "example": {"payload": "hello", "idempotency_key": "order-17"},
}
_RECORDS: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["records"],
    "properties": {"records": {"type": "array", "items": _RECORD, "minItems": 1}},
}


def _bytes(description: str) -> dict[str, Any]:
    return {"schema": {"type": "string", "format": "binary", "description": description}}


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


_ENCODING: Final = _header(
    "Content-Encoding", "How the body is compressed.", type="string", enum=["gzip", "zstd"]
)
_SINGLE: Final[dict[str, Any]] = {
    "parameters": [
        _ENCODING,
        _header(
            "X-Partition",
            "Partition of a protobuf event, which has no field for it.",
            type="integer",
            minimum=0,
            maximum=PARTITION_MAX,
        ),
    ],
    "requestBody": {
        "required": True,
        "content": {
            JSON.decode(): {"schema": _RECORD},
            PROTOBUF.decode(): _bytes("`zombi.Event` of event.proto."),
        },
    },
}
_BULK: Final[dict[str, Any]] = {
    "parameters": [
        _ENCODING,
        _header(
            "Prefer",
            "`return=minimal` asks for the short answer.",
            type="string",
            enum=["return=minimal"],
        ),
    ],
    "requestBody": {
        "required": True,
        "content": {
            JSON.decode(): {"schema": _RECORDS},
            NDJSON.decode(): _bytes("One JSON event a line."),
            PROTOBUF.decode(): _bytes("`zombi.BulkWriteRequest` of event.proto."),
            ARROW.decode(): _bytes(
                "An Arrow IPC stream with the column payload and, if you like, partition, "
                "timestamp_ms, idempotency_key and headers."
            ),
        },
    },
}
