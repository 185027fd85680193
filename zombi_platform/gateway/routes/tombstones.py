"""Tombstones of files in the lake, for workers that write and sweep."""

from __future__ import annotations

import base64
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta

from zombi_platform.errors import InvalidRequestError
from zombi_platform.gateway.openapi import MOVING, SIGNED_IN, errors, json_body
from zombi_platform.gateway.requests import decode_body
from zombi_platform.gateway.routes.parameters import TableName
from zombi_platform.gateway.routes.pipeline import (
    BODY_BYTES_MAX,
    EPOCH,
    PATHS_MAX,
    REFUSALS,
    Done,
    FilePath,
    epoch_of,
    to_json,
    worker,
)
from zombi_platform.gateway.state import GatewayState
from zombi_platform.progress import Due

PAGE_MAX: Final = 10_000
GRACE_SECS_MAX: Final = 10 * 365 * 86400

Paths = Annotated[list[FilePath], Meta(max_length=PATHS_MAX)]


class Buried(msgspec.Struct):
    paths: Paths = []
    prefixes: Paths = []
    grace_secs: Annotated[float, Meta(ge=0, le=GRACE_SECS_MAX)] | None = None
    """Until they are due; None for the usual time."""


class Swept(msgspec.Struct):
    paths: Paths = []
    prefixes: Paths = []


def tombstone_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(prefix="/pipeline/tables/{table}/tombstones", tags=[MOVING])
    graves = state.pipeline.tombstones

    @router.get(
        "",
        summary="Files whose time has come",
        description="Delete those that no snapshot refers to, then take their tombstones away.",
        response_class=Response,
        responses={200: {"model": Due}, **errors(400, 401, 403, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def list_due(
        request: Request,
        table: TableName,
        after: Annotated[
            str | None,
            Query(description="`next` of the page before."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 1000,
    ) -> Response:
        worker(request, state, table)
        found = await graves.due(table, None if after is None else _read_cursor(after), limit)
        following = None if found.next is None else _write_cursor(found.next)
        return to_json(Due(found.paths, found.prefixes, following))

    @router.post(
        "",
        summary="Put tombstones",
        response_class=Response,
        responses={200: {"model": Done}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH, **json_body(Buried)},
    )
    async def put_tombstones(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        epoch = epoch_of(request)
        body = await decode_body(request, state, Buried, BODY_BYTES_MAX)
        grace = body.grace_secs
        if grace is None:
            grace = state.settings.delete_grace_secs
        await graves.add(table, epoch, body.paths, body.prefixes, grace)
        return to_json(Done())

    @router.delete(
        "",
        summary="Take away tombstones of files that are deleted",
        response_class=Response,
        responses={200: {"model": Done}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH, **json_body(Swept)},
    )
    async def drop_tombstones(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        epoch = epoch_of(request)
        body = await decode_body(request, state, Swept, BODY_BYTES_MAX)
        await graves.drop(table, epoch, body.paths, body.prefixes)
        return to_json(Done())

    return router


def _write_cursor(place: str) -> str:
    """A place as text that is short in a URL, whatever is in its path."""
    return base64.urlsafe_b64encode(place.encode()).decode()


def _read_cursor(text: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise InvalidRequestError(f"after {text[:40]!r} is not the `next` of a page") from error
