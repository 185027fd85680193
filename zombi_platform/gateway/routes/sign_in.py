"""OAuth2 client credentials, the way Iceberg REST clients sign in."""

from __future__ import annotations

from typing import Any, Final, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from zombi_platform.errors import InvalidRequestError, UnauthorizedError
from zombi_platform.gateway.openapi import SIGNING_IN, oauth_errors
from zombi_platform.gateway.requests import read_body
from zombi_platform.gateway.state import GatewayState

FORM_BYTES_MAX: Final = 64 * 1024
FORM_FIELDS_MAX: Final = 16


class AccessToken(BaseModel):
    access_token: str
    token_type: Literal["bearer"] = "bearer"
    expires_in: int = Field(description="Seconds.")


_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-www-form-urlencoded": {
                "schema": {
                    "type": "object",
                    "required": ["grant_type", "client_id", "client_secret"],
                    "properties": {
                        "grant_type": {"type": "string", "enum": ["client_credentials"]},
                        "client_id": {"type": "string", "description": "The token's id."},
                        "client_secret": {
                            "type": "string",
                            "description": "The token's secret, or the whole token.",
                        },
                    },
                }
            }
        },
    }
}


def sign_in_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(tags=[SIGNING_IN])

    @router.post(
        "/v1/oauth/tokens",
        summary="OAuth2 client credentials",
        responses=oauth_errors(400, 401, 413),
        openapi_extra=_FORM,
    )
    async def grant(request: Request) -> AccessToken:
        form = _parse_form(await read_body(request, state, FORM_BYTES_MAX))
        if form.get("grant_type") != "client_credentials":
            raise InvalidRequestError("grant_type must be client_credentials")
        try:
            client_id, secret = form["client_id"], form["client_secret"]
        except KeyError as error:
            raise UnauthorizedError(f"{error.args[0]} is missing") from error
        token, seconds = state.access.grant(client_id, secret)
        return AccessToken(access_token=token, expires_in=seconds)

    return router


def _parse_form(body: bytes) -> dict[str, str]:
    try:
        fields = parse_qs(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=FORM_FIELDS_MAX
        )
    except ValueError as error:
        raise InvalidRequestError(f"the body is not a form: {error}") from error
    return {name: values[0] for name, values in fields.items()}
