"""The OpenAPI document: shapes of bodies and answers, errors by route, how to sign in.

FastAPI derives parameters and models from the routes; what it cannot see (bodies that are
decoded by hand, headers of answers, tokens) is said here. Nothing here runs per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from zombi_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotAcceptableError,
    NotFoundError,
    PayloadTooLargeError,
    UnauthorizedError,
    UnsupportedMediaError,
)

WRITING: Final = "Write"
READING: Final = "Read"
CONSUMING: Final = "Consumer offsets"
MOVING: Final = "Pipeline"
OPERATING: Final = "Operate"
CATALOG: Final = "Iceberg catalog"
SIGNING_IN: Final = "Sign in"

TAGS: Final = [
    {"name": WRITING, "description": "Events in. The answer comes when they are durable."},
    {"name": READING, "description": "Events that are still in the hot buffer."},
    {"name": CONSUMING, "description": "Deprecated: read the tables with an Iceberg engine."},
    {"name": MOVING, "description": "From the hot buffer to Iceberg; for workers."},
    {"name": OPERATING, "description": "Health, statistics and metrics."},
    {"name": CATALOG, "description": "Iceberg REST: every table for every engine."},
    {"name": SIGNING_IN, "description": "OAuth2 client credentials made from a token."},
]


class ErrorBody(BaseModel):
    """Every error has this shape."""

    error: str = Field(description="What was wrong, and what to do.")
    code: str = Field(description="A name for programs.", examples=["INVALID_REQUEST"])


class IcebergErrorModel(BaseModel):
    message: str
    type: str = Field(examples=["NoSuchTableException"])
    code: int = Field(description="The status.")


class IcebergErrorBody(BaseModel):
    """Every error under `/v1`, as Iceberg REST has it."""

    error: IcebergErrorModel


class OAuthErrorBody(BaseModel):
    """Errors of signing in, as OAuth2 has them."""

    error: str = Field(examples=["invalid_client"])
    error_description: str = Field(description="What was wrong, and what to do.")


_REJECTED: Final = {
    kind.status: kind.code
    for kind in (
        InvalidRequestError,
        UnauthorizedError,
        ForbiddenError,
        NotFoundError,
        NotAcceptableError,
        ConflictError,
        PayloadTooLargeError,
        UnsupportedMediaError,
    )
}
_RETRY_AFTER: Final = {
    "description": "Seconds to wait before the next try.",
    "schema": {"type": "integer", "minimum": 1},
}
_CHALLENGE: Final = {"description": "Always `Bearer`.", "schema": {"type": "string"}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for FastAPI's `responses`."""
    return {status: _error(status) for status in statuses}


def iceberg_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same for routes of the Iceberg catalog."""
    return {status: {**_error(status), "model": IcebergErrorBody} for status in statuses}


def oauth_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same for signing in."""
    return {status: {**_error(status), "model": OAuthErrorBody} for status in statuses}


def _error(status: int) -> dict[str, Any]:
    code = _REJECTED.get(status)
    about = HTTPStatus(status).phrase + (f", usually `{code}`" if code else "")
    answer: dict[str, Any] = {"model": ErrorBody, "description": about}
    if status == 401:
        answer["headers"] = {"WWW-Authenticate": _CHALLENGE}
    if status == 503:
        answer["headers"] = {"Retry-After": _RETRY_AFTER}
        answer["description"] = (
            "Not now: `SERVER_OVERLOADED`, `BUFFER_FULL` or `HOT_STORAGE_UNAVAILABLE`"
        )
    return answer


def json_body(kind: Any) -> dict[str, Any]:
    """For `openapi_extra`: a JSON body that is decoded by hand to this type."""
    [schema], parts = msgspec.json.schema_components([kind])
    content = {"application/json": {"schema": _inlined(schema, parts)}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {name: _inlined(value, parts) for name, value in schema.items()}
    return [_inlined(item, parts) for item in schema] if isinstance(schema, list) else schema


SIGNED_IN: Final[dict[str, Any]] = {"security": [{"token": []}, {"client_credentials": []}]}
"""For `openapi_extra`: the route wants a token when the gateway has tokens configured."""

_SCHEMES: Final[dict[str, Any]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token made by `zombi token create`. Without a tokens file the gateway "
        "serves its own machine only and wants none.",
    },
    "client_credentials": {
        "type": "oauth2",
        "description": "The token's id and secret, exchanged for an access token.",
        "flows": {"clientCredentials": {"tokenUrl": "/v1/oauth/tokens", "scopes": {}}},
    },
}


_CONNECTION_ERRORS: Final = {
    "408": "The request did not arrive in time: `REQUEST_TIMEOUT`",
    "431": "The head is too large: `HEADERS_TOO_LARGE`",
    "503": "Too many connections: `SERVER_OVERLOADED`",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            tags=TAGS,
            routes=app.routes,
        )
        _drop_unused_errors(document)
        _add_connection_errors(document)
        document["components"]["securitySchemes"] = _SCHEMES
        app.openapi_schema = document
    return app.openapi_schema


def _drop_unused_errors(document: dict[str, Any]) -> None:
    """FastAPI says 422 wherever there are parameters; here such requests get 400."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _add_connection_errors(document: dict[str, Any]) -> None:
    """What the connection itself may answer, whatever the route."""
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, about in _CONNECTION_ERRORS.items():
                answer = {"description": about, "content": {"application/json": {"schema": schema}}}
                operation["responses"].setdefault(status, answer)
