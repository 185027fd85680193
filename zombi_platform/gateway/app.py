"""FastAPI assembled: the routes, the documentation, and the one shape of every error."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from zombi_platform import __version__
from zombi_platform.errors import InvalidRequestError, NotFoundError, ZombiError
from zombi_platform.gateway import routes
from zombi_platform.gateway.documentation import documentation_routes
from zombi_platform.gateway.iceberg_errors import error_body
from zombi_platform.gateway.openapi import describe
from zombi_platform.gateway.requests import to_response
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.writes import Answer, error_answer


def create_app(state: GatewayState) -> FastAPI:
    app = _Documented(
        title="Zombi Platform",
        version=__version__,
        description="Events in over HTTP, durable before the answer.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    _handle_errors(app, state)
    for made in (
        routes.write_routes(state),
        routes.read_routes(state),
        routes.consumer_routes(state),
        routes.iceberg_routes(state),
        routes.flush_routes(state),
        routes.pipeline_routes(state),
        routes.tombstone_routes(state),
        routes.operation_routes(state),
        routes.sign_in_routes(state),
        documentation_routes(),
    ):
        app.include_router(made)
    return app


class _Documented(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return describe(self)


def _handle_errors(app: FastAPI, state: GatewayState) -> None:
    def refuse(request: Request, error: ZombiError, status: int | None = None) -> Response:
        state.metrics.errors += 1
        answer = error_answer(error)
        if status is not None:
            answer = Answer(status, answer.body)
        body = error_body(request.url.path, error, answer.status)
        return to_response(answer if body is None else msgspec.structs.replace(answer, body=body))

    @app.exception_handler(ZombiError)
    async def known(request: Request, error: ZombiError) -> Response:
        return refuse(request, error)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=408)  # which nobody reads

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        return refuse(request, InvalidRequestError(f"{where}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return refuse(
                request, NotFoundError(f"there is no {request.url.path[:200]!r}; see /docs")
            )
        if error.status_code == 405:
            refused = ZombiError(
                f"{request.method} is not for {request.url.path[:200]!r}; see /docs",
                code="METHOD_NOT_ALLOWED",
            )
            response = refuse(request, refused, 405)
            response.headers.update(error.headers or {})
            return response
        return refuse(request, InvalidRequestError(str(error.detail)), error.status_code)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return refuse(request, ZombiError(f"an internal error happened: {type(error).__name__}"))
