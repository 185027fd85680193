"""The OpenAPI document against a real gateway: what it says is what is answered.

schemathesis makes good and bad requests from the document, the same ones every time, and
holds each answer against it: no 5xx, a status, content type, headers and body as described,
other methods refused, and no route open without its token.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow as pa
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    ignored_auth,
    negative_data_rejection,
    positive_data_acceptance,
)

from tests.gateway import Gateway, running
from zombi_platform.gateway.event_pb2 import Event
from zombi_platform.gateway.openapi import TAGS
from zombi_platform.gateway.tokens import create_token

EXAMPLES = 6
GUESSES = [positive_data_acceptance, negative_data_rejection]
"""Checks that take the document for all there is to know: 5.0 is an integer to them, and any
bytes are Arrow. What is taken and refused has tests of its own."""
TAGS_HELD = [tag["name"] for tag in TAGS]


def arrow_stream(payloads: list[bytes]) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"payload": payloads})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


payloads = st.lists(st.binary(max_size=50), min_size=1, max_size=5)
schemathesis.openapi.media_type(
    "application/x-protobuf", st.binary().map(lambda p: Event(payload=p).SerializeToString())
)
schemathesis.openapi.media_type("application/vnd.apache.arrow.stream", payloads.map(arrow_stream))
schemathesis.openapi.media_type(
    "application/x-ndjson", payloads.map(lambda ps: b'{"payload":"x"}\n' * len(ps))
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("open"), durability="wal") as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    root = tmp_path_factory.mktemp("guarded")
    token = create_token(root / "tokens.json", "fuzz", ["admin"])
    tokens = {"tokens_file": str(root / "tokens.json")}
    with running(root / "data", durability="wal", **tokens) as opened:
        yield opened, token


repeatable = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def hold_against_document(gateway: Gateway, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    excluded = GUESSES if token else [*GUESSES, ignored_auth]
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json").include(tag=TAGS_HELD)
    problems = []
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:

            @repeatable
            @given(case=operation.as_strategy(generation_mode=mode))
            def holds(case: Any) -> None:
                if case.path.endswith("/flush") and case.meta.generation.mode.is_positive:
                    case.query["wait_secs"] = 0  # any other would be waited for
                case.call_and_validate(headers=headers, excluded_checks=excluded)

            try:
                holds()
            except Unsatisfiable:
                continue  # a route that takes nothing cannot be given anything wrong
            except (AssertionError, FailureGroup) as problem:
                problems.append(f"{operation.label}, {mode}: {problem}")
    assert not problems, "\n".join(problems)


def test_answers_are_as_described(gateway: Gateway) -> None:
    hold_against_document(gateway, None)


def test_answers_are_as_described_with_tokens(guarded: tuple[Gateway, str]) -> None:
    hold_against_document(*guarded)


def test_the_document_names_every_route_and_docs_need_no_other_host(gateway: Gateway) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert operation["tags"], path
            for status, answer in operation["responses"].items():
                assert answer["description"], (path, status)
                assert answer.get("content") or status in ("204", "304"), (path, status)
    page = httpx.get(f"{gateway.url}/docs").text
    assert "http://" not in page
    assert "https://" not in page
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert asset in page
        assert len(httpx.get(f"{gateway.url}/docs/assets/{asset}").content) > 1000
