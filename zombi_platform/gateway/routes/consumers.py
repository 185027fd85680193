"""Consumer offsets: deprecated, kept for clients of the seed's API, and they say so."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta
from pydantic import BaseModel, Field

from zombi_platform.errors import InvalidRequestError, NotFoundError
from zombi_platform.events import PARTITION_MAX, SEQUENCE_MAX, TABLE_NAME_PATTERN, check_table
from zombi_platform.gateway.openapi import CONSUMING, SIGNED_IN, errors
from zombi_platform.gateway.requests import caller, decode_body
from zombi_platform.gateway.routes.parameters import PartitionNumber
from zombi_platform.gateway.state import GatewayState

DEPRECATED: Final = {"Deprecation": "true"}
GROUP: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)
GROUP_PATTERN: Final = f"^{GROUP.pattern}$"
BODY_BYTES_MAX: Final = 64 * 1024


class Commit(msgspec.Struct):
    topic: str
    offset: Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
    partition: Annotated[int, Meta(ge=0, le=PARTITION_MAX)] = 0


class Offset(BaseModel):
    offset: int = Field(ge=0, le=SEQUENCE_MAX)


GroupName = Annotated[
    str,
    Path(description="A consumer group.", json_schema_extra={"pattern": GROUP_PATTERN}),
]
Topic = Annotated[
    str,
    Query(description="Name of a table.", json_schema_extra={"pattern": TABLE_NAME_PATTERN}),
]

_DEPRECATION: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "headers": {
            "Deprecation": {"description": "Always `true`.", "schema": {"type": "string"}},
        }
    }
}
_COMMIT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["topic", "offset"],
                    "properties": {
                        "topic": {"type": "string", "pattern": TABLE_NAME_PATTERN},
                        "partition": {
                            "type": "integer",
                            "minimum": 0,
                            "maximum": PARTITION_MAX,
                            "default": 0,
                        },
                        "offset": {"type": "integer", "minimum": 0, "maximum": SEQUENCE_MAX},
                    },
                }
            }
        },
    }
}


def consumer_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(tags=[CONSUMING], deprecated=True)

    @router.post(
        "/consumers/{group}/commit",
        summary="Keep a consumer's offset",
        responses={**_DEPRECATION, **errors(400, 401, 403, 413, 503)},
        openapi_extra={**SIGNED_IN, **_COMMIT},
    )
    async def commit_offset(request: Request, response: Response, group: GroupName) -> Offset:
        who = caller(request, state)
        body = await decode_body(request, state, Commit, BODY_BYTES_MAX)
        who.require("read", check_table(body.topic))
        _check_group(group)
        await state.hot.commit_offset(group, body.topic, body.partition, body.offset)
        response.headers.update(DEPRECATED)
        return Offset(offset=body.offset)

    @router.get(
        "/consumers/{group}/offset",
        summary="A consumer's offset",
        responses={**_DEPRECATION, **errors(400, 401, 403, 404)},
        openapi_extra=SIGNED_IN,
    )
    async def get_offset(
        request: Request,
        response: Response,
        group: GroupName,
        topic: Topic,
        partition: PartitionNumber = 0,
    ) -> Offset:
        caller(request, state).require("read", check_table(topic))
        _check_group(group)
        offset = await state.hot.committed_offset(group, topic, partition)
        if offset is None:
            raise NotFoundError(
                f"group {group!r} has no offset for partition {partition} of {topic!r}",
                code="OFFSET_NOT_FOUND",
            )
        response.headers.update(DEPRECATED)
        return Offset(offset=offset)

    return router


def _check_group(group: str) -> None:
    if GROUP.fullmatch(group) is None:
        raise InvalidRequestError(f"consumer group {group[:140]!r} must match {GROUP_PATTERN}")
