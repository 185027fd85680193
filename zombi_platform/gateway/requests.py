"""What every route asks of a request: who sent it, and its body within a limit."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import Request, Response

from zombi_platform.errors import InvalidRequestError, ZombiError
from zombi_platform.gateway.bodies import too_large
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.tokens import Principal
from zombi_platform.gateway.writes import Answer

T = TypeVar("T")


def caller(request: Request, state: GatewayState) -> Principal:
    header = request.headers.get("authorization")
    return state.access.authenticate(None if header is None else header.encode("latin-1"))


async def read_body(request: Request, state: GatewayState, limit: int) -> bytes:
    """The whole body, if it is within the limit.

    A body past it is still received, though not kept: closing on a client that is sending
    would reset the connection before the client sees why. One that waits for a go-ahead
    (`Expect`) is refused before it sends, and the request timeout bounds them all.
    """
    declared = request.headers.get("content-length", "")
    if "expect" in request.headers and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = held = 0
    refusal: ZombiError | None = None
    try:
        async for part in request.stream():
            size += len(part)
            if refusal is not None:
                continue
            refusal = _hold(state, len(part), size, limit)
            if refusal is None:
                parts.append(part)
                held += len(part)
            else:
                # At once, not when the rest has come: others wait for the room.
                parts.clear()
                state.arriving.give_back(held)
                held = 0
    finally:
        state.arriving.give_back(held)
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _hold(state: GatewayState, part: int, size: int, limit: int) -> ZombiError | None:
    if size > limit:
        return too_large(limit)
    try:
        state.arriving.take(part)
    except ZombiError as error:
        return error
    return None


async def decode_body(request: Request, state: GatewayState, kind: type[T], limit: int) -> T:
    """The body as JSON of this type."""
    body = await read_body(request, state, limit)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the JSON does not fit: {error}") from error


def to_response(answer: Answer) -> Response:
    headers = {}
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    if answer.retry_after is not None:
        headers["retry-after"] = str(answer.retry_after)
    return Response(answer.body, answer.status, headers, "application/json")
