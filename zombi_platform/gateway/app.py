"""FastAPI: every route of the gateway, and the one shape of its errors.

The write routes here and in the fast lane share `Writes`. Handlers translate between HTTP
and the hot buffer and decide nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from zombi_platform import __version__
from zombi_platform.errors import (
    InvalidRequestError,
    NotAcceptableError,
    NotFoundError,
    UnauthorizedError,
    ZombiError,
)
from zombi_platform.events import PARTITION_MAX, SEQUENCE_MAX, TIMESTAMP_MS_MAX, check_table
from zombi_platform.gateway.bodies import too_large
from zombi_platform.gateway.decoding import ARROW
from zombi_platform.gateway.reads import (
    ARROW_LIMIT_MAX,
    JSON_LIMIT_MAX,
    arrow_chunks,
    json_page,
    parse_fields,
)
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.tokens import Principal
from zombi_platform.gateway.writes import Answer, WriteRequest, error_answer

ARROW_TYPE = ARROW.decode()
DEPRECATED = {"Deprecation": "true"}
GROUP_PATTERN = "^[a-zA-Z0-9_.-]{1,128}$"

Partition = Annotated[int, Query(ge=0, le=PARTITION_MAX)]


class ErrorBody(BaseModel):
    error: str
    code: str


class OffsetCommit(BaseModel):
    topic: str
    partition: Annotated[int, Field(ge=0, le=PARTITION_MAX)] = 0
    offset: Annotated[int, Field(ge=0, le=SEQUENCE_MAX)]


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 406, 413, 415, 503)
}


def create_app(state: GatewayState) -> FastAPI:
    app = FastAPI(
        title="Zombi Platform",
        version=__version__,
        description="Events in over HTTP, durable before the answer.",
        responses=ERRORS,
        redirect_slashes=False,
    )
    _handle_errors(app, state)
    _add_writes(app, state)
    _add_reads(app, state)
    _add_consumers(app, state)
    _add_operations(app, state)
    return app


def to_response(answer: Answer) -> Response:
    headers = {}
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    if answer.retry_after is not None:
        headers["retry-after"] = str(answer.retry_after)
    return Response(answer.body, answer.status, headers, "application/json")


def _handle_errors(app: FastAPI, state: GatewayState) -> None:
    def refuse(error: ZombiError, status: int | None = None) -> Response:
        state.metrics.errors += 1
        answer = error_answer(error)
        if status is not None:
            answer = Answer(status, answer.body)
        return to_response(answer)

    @app.exception_handler(ZombiError)
    async def known(_: Request, error: ZombiError) -> Response:
        return refuse(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        return refuse(InvalidRequestError(f"{where}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return refuse(NotFoundError(f"there is no {request.url.path[:200]!r}; see /docs"))
        if error.status_code == 405:
            refused = ZombiError(
                f"{request.method} is not for {request.url.path[:200]!r}; see /docs",
                code="METHOD_NOT_ALLOWED",
            )
            response = refuse(refused, 405)
            response.headers.update(error.headers or {})
            return response
        return refuse(ZombiError(str(error.detail)), error.status_code)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return refuse(ZombiError(f"an internal error happened: {type(error).__name__}"))


def _caller(request: Request, state: GatewayState) -> Principal:
    header = request.headers.get("authorization")
    return state.access.authenticate(None if header is None else header.encode("latin-1"))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, if it is within the limit.

    A body past it is still received, though not kept: closing on a client that is sending
    would reset the connection before the client sees why. One that waits for a go-ahead
    (`Expect`) is refused before it sends, and the request timeout bounds them all.
    """
    declared = request.headers.get("content-length", "")
    if "expect" in request.headers and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            parts.clear()
        else:
            parts.append(part)
    if size > limit:
        raise too_large(limit)
    return b"".join(parts)


_BODY: dict[str, Any] = {"type": "string", "format": "binary"}
_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "payload": {"type": ["string", "null"]},
        "payload_base64": {"type": ["string", "null"], "format": "byte"},
        "partition": {"type": "integer", "minimum": 0, "maximum": PARTITION_MAX, "default": 0},
        "timestamp_ms": {"type": ["integer", "null"], "minimum": 0, "maximum": TIMESTAMP_MS_MAX},
        "idempotency_key": {"type": ["string", "null"]},
        "headers": {
            "type": ["object", "null"],
            "additionalProperties": {"type": "string"},
        },
    },
}
_SINGLE_BODY = {
    "application/json": {"schema": _RECORD},
    "application/x-protobuf": {"schema": _BODY},
}
_BULK_BODY = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["records"],
            "properties": {"records": {"type": "array", "items": _RECORD, "minItems": 1}},
        }
    },
    "application/x-ndjson": {"schema": _BODY},
    "application/x-protobuf": {"schema": _BODY},
    ARROW_TYPE: {"schema": _BODY},
}


def _add_writes(app: FastAPI, state: GatewayState) -> None:
    async def write(request: Request, table: str, bulk: bool) -> Response:
        principal = _caller(request, state)
        write = WriteRequest(check_table(table), bulk)
        body = await read_body(request, state.writes.body_limit)
        for name, value in request.headers.raw:
            match name:
                case b"content-type":
                    write.content_type = value
                case b"content-encoding":
                    write.content_encoding = value
                case b"x-partition":
                    write.partition = value
                case b"prefer":
                    write.prefer = value
        write.body = body
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        state.writes.submit(write, principal, done)
        return to_response(await answered)

    @app.post(
        "/tables/{table}",
        status_code=202,
        summary="Write one event",
        openapi_extra={"requestBody": {"required": True, "content": _SINGLE_BODY}},
    )
    async def write_event(request: Request, table: str) -> Response:
        return await write(request, table, bulk=False)

    @app.post(
        "/tables/{table}/bulk",
        status_code=202,
        summary="Write many events, all or none",
        openapi_extra={"requestBody": {"required": True, "content": _BULK_BODY}},
    )
    async def write_events(request: Request, table: str) -> Response:
        return await write(request, table, bulk=True)


def _add_reads(app: FastAPI, state: GatewayState) -> None:
    @app.get("/tables", summary="Tables in the hot buffer")
    async def list_tables(request: Request) -> dict[str, Any]:
        caller = _caller(request, state)
        caller.require("read")
        tables = [asdict(table) for table in state.hot.tables() if caller.may("read", table.table)]
        return {"tables": tables}

    @app.get("/tables/{table}/watermark", summary="How far each partition has come")
    async def watermark(request: Request, table: str) -> dict[str, Any]:
        _caller(request, state).require("read", check_table(table))
        marks = state.hot.watermarks(table)
        return {"table": table, "partitions": {str(n): asdict(mark) for n, mark in marks.items()}}

    @app.get(
        "/tables/{table}",
        summary="Read hot events",
        response_class=Response,
        responses={200: {"content": {"application/json": {}, ARROW_TYPE: {"schema": _BODY}}}},
    )
    async def read_events(
        request: Request,
        table: str,
        partition: Partition | None = None,
        offset: Annotated[int, Query(ge=0, le=SEQUENCE_MAX)] = 0,
        limit: Annotated[int, Query(ge=1, le=ARROW_LIMIT_MAX)] = 100,
        since: Annotated[int | None, Query(ge=0, le=TIMESTAMP_MS_MAX)] = None,
        fields: str | None = None,
    ) -> Response:
        started = time.perf_counter()
        _caller(request, state).require("read", check_table(table))
        arrow = _wants_arrow(request)
        if not arrow and limit > JSON_LIMIT_MAX:
            raise InvalidRequestError(
                f"limit {limit} is over {JSON_LIMIT_MAX} for JSON; read more as {ARROW_TYPE}"
            )
        names = parse_fields(fields)
        loop = asyncio.get_running_loop()
        reading = await loop.run_in_executor(
            state.readers, state.hot.reading, table, partition, offset, limit, since
        )
        if not arrow:
            page = await loop.run_in_executor(state.readers, json_page, reading, names)
            state.metrics.did_read(page.count, time.perf_counter() - started)
            return Response(page.body, media_type="application/json")

        async def chunks() -> AsyncIterator[bytes]:
            pieces, count = arrow_chunks(reading, names), 0
            while piece := await loop.run_in_executor(state.readers, next, pieces, None):
                count += piece[1]
                yield piece[0]
            state.metrics.did_read(count, time.perf_counter() - started)

        more = {"X-Zombi-Has-More": "true" if reading.has_more else "false"}
        return StreamingResponse(chunks(), headers=more, media_type=ARROW_TYPE)


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


def _add_consumers(app: FastAPI, state: GatewayState) -> None:
    @app.post("/consumers/{group}/commit", deprecated=True, summary="Keep a consumer's offset")
    async def commit_offset(
        request: Request, response: Response, group: str, body: OffsetCommit
    ) -> dict[str, Any]:
        _caller(request, state).require("read", check_table(body.topic))
        _check_group(group)
        await state.hot.commit_offset(group, body.topic, body.partition, body.offset)
        response.headers.update(DEPRECATED)
        return {"offset": body.offset}

    @app.get("/consumers/{group}/offset", deprecated=True, summary="A consumer's offset")
    async def get_offset(
        request: Request, response: Response, group: str, topic: str, partition: Partition = 0
    ) -> dict[str, Any]:
        _caller(request, state).require("read", check_table(topic))
        _check_group(group)
        offset = await state.hot.committed_offset(group, topic, partition)
        if offset is None:
            raise NotFoundError(
                f"group {group!r} has no offset for partition {partition} of {topic!r}",
                code="OFFSET_NOT_FOUND",
            )
        response.headers.update(DEPRECATED)
        return {"offset": offset}


def _check_group(group: str) -> None:
    if not group or len(group) > 128 or not all(c.isalnum() or c in "_.-" for c in group):
        raise InvalidRequestError(f"consumer group {group[:140]!r} must match {GROUP_PATTERN}")


def _add_operations(app: FastAPI, state: GatewayState) -> None:
    @app.get("/health", summary="Whether the process answers")
    @app.get("/health/live", summary="Liveness probe")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health/ready", summary="Readiness probe")
    async def ready(response: Response) -> dict[str, Any]:
        failure = state.hot.failure
        busy = state.metrics.inflight_bytes >= state.settings.max_inflight_bytes_mb * 2**20 * 0.9
        if failure is not None:
            response.status_code = 503
        hot = {"status": "ok"} if failure is None else {"status": "error", "error": str(failure)}
        return {
            "status": "ready" if failure is None else "not_ready",
            "hot_storage": hot,
            "backpressure": {
                "status": "warning" if busy else "ok",
                "inflight_writes": state.metrics.inflight_writes,
                "inflight_bytes": state.metrics.inflight_bytes,
                "max_inflight_bytes": state.settings.max_inflight_bytes_mb * 2**20,
            },
        }

    @app.get("/stats", summary="Server statistics")
    async def stats(request: Request) -> dict[str, Any]:
        _caller(request, state).require("read")
        hot = {"bytes": state.hot.bytes, "disk_bytes": state.hot.disk_bytes()}
        return {**state.metrics.stats(), "hot": hot}

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        _caller(request, state).require("read")
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.post("/v1/oauth/tokens", summary="OAuth2 client credentials")
    async def grant(request: Request) -> dict[str, Any]:
        form = parse_qs((await read_body(request, 64 * 1024)).decode("latin-1"))
        if form.get("grant_type") != ["client_credentials"]:
            raise InvalidRequestError("grant_type must be client_credentials")
        try:
            client_id, secret = form["client_id"][0], form["client_secret"][0]
        except KeyError as error:
            raise UnauthorizedError(f"{error.args[0]} is missing") from error
        token, seconds = state.access.grant(client_id, secret)
        return {"access_token": token, "token_type": "bearer", "expires_in": seconds}
