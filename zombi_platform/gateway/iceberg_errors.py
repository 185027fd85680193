"""Errors as Iceberg REST clients expect them under `/v1`, and OAuth2 clients at its token route.

Clients decide by status and type whether a commit certainly failed, may be retried or must
be looked up, so the type follows from the status and the code and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from zombi_platform.errors import ZombiError

CATALOG_PATH: Final = "/v1/"
SIGN_IN_PATH: Final = "/v1/oauth/tokens"

_BY_CODE: Final[Mapping[str, str]] = {
    "NAMESPACE_NOT_FOUND": "NoSuchNamespaceException",
    "TABLE_NOT_FOUND": "NoSuchTableException",
    "COMMIT_FAILED": "CommitFailedException",
    "COMMIT_STATE_UNKNOWN": "CommitStateUnknownException",
    "METHOD_NOT_ALLOWED": "UnsupportedOperationException",
}
_BY_STATUS: Final[Mapping[int, str]] = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NotFoundException",
    409: "CommitFailedException",
    413: "BadRequestException",
    503: "ServiceUnavailableException",
}
_OAUTH: Final[Mapping[int, str]] = {401: "invalid_client", 403: "unauthorized_client"}


def error_body(path: str, error: ZombiError, status: int) -> bytes | None:
    """The body for a path with an error shape of its own; none for all others."""
    if path == SIGN_IN_PATH:
        name = _OAUTH.get(status, "invalid_request")
        return msgspec.json.encode({"error": name, "error_description": str(error)})
    if not path.startswith(CATALOG_PATH):
        return None
    kind = _BY_CODE.get(error.code) or _BY_STATUS.get(status) or "InternalServerError"
    model = {"message": str(error), "type": kind, "code": status}
    return msgspec.json.encode({"error": model})
