"""Tokens at a real gateway: roles, table limits, revocation, client credentials, binding."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway import Gateway, running
from zombi_platform.gateway.tokens import create_token, revoke_token


def status(gateway: Gateway, token: str | None, path: str, method: str = "POST") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"payload": "x"} if method == "POST" else None
    return httpx.request(method, gateway.url + path, headers=headers, json=body).status_code


@pytest.mark.parametrize("fast_lane", ["true", "false"])
def test_a_token_opens_only_what_its_roles_and_tables_allow(tmp_path: Path, fast_lane: str) -> None:
    file = tmp_path / "tokens.json"
    producer = create_token(file, "p", ["produce"], ["orders"])
    reader = create_token(file, "r", ["read"])
    assert producer not in file.read_text()
    settings = {"tokens_file": str(file), "fast_lane": fast_lane}
    with running(tmp_path / "data", **settings) as gateway:
        assert status(gateway, producer, "/tables/orders") == 202
        assert status(gateway, producer, "/tables/other") == 403
        assert status(gateway, producer, "/tables/orders", "GET") == 403
        assert status(gateway, reader, "/tables/orders", "GET") == 200
        assert status(gateway, reader, "/tables/orders") == 403
        assert status(gateway, None, "/tables/orders") == 401
        assert status(gateway, producer[:-1] + "x", "/tables/orders") == 401
        form = {"grant_type": "client_credentials", "client_secret": producer}
        form["client_id"] = producer.split("_")[1]
        granted = httpx.post(gateway.url + "/v1/oauth/tokens", data=form).json()
        assert status(gateway, granted["access_token"], "/tables/orders") == 202
        revoke_token(file, "p")
        while status(gateway, producer, "/tables/orders") != 401:
            pass
        assert status(gateway, granted["access_token"], "/tables/orders") == 401


def test_the_gateway_does_not_bind_beyond_loopback_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not start"):
        Gateway(tmp_path, host="0.0.0.0")
