"""Iceberg REST: the tables for Spark, Trino, DuckDB, pyiceberg and whatever else speaks it.

Two warehouses have the same routes: `lake`, the committed tables, also without a prefix, and
`live`, the same with events that were acked a moment ago. Only `lake` takes commits, and
what `/v1/config` advertises is exactly what there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from zombi_platform.catalog.metadata import load_answer
from zombi_platform.catalog.warehouse import LoadedTable, Snapshots, no_table
from zombi_platform.errors import ForbiddenError, InvalidRequestError, NotFoundError
from zombi_platform.events import TABLE_NAME
from zombi_platform.gateway.metrics import Histogram
from zombi_platform.gateway.openapi import CATALOG, SIGNED_IN, iceberg_errors
from zombi_platform.gateway.requests import caller, read_body
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.tokens import Principal

METRICS_BYTES_MAX: Final = 2**20
PAGE_SIZE_MAX: Final = 10_000

NAMESPACES: Final = "/namespaces"
NAMESPACE: Final = NAMESPACES + "/{namespace}"
TABLES: Final = NAMESPACE + "/tables"
TABLE: Final = TABLES + "/{table}"
METRICS: Final = TABLE + "/metrics"

READS: Final = tuple(
    f"{method} /v1/{{prefix}}{path}"
    for method, path in (
        ("GET", NAMESPACES),
        ("GET", NAMESPACE),
        ("HEAD", NAMESPACE),
        ("GET", TABLES),
        ("GET", TABLE),
        ("HEAD", TABLE),
        ("POST", METRICS),
    )
)
COMMITS: Final = (f"POST /v1/{{prefix}}{TABLE}",)

Name = Annotated[str, Path(description="Name of a namespace.")]
Table = Annotated[str, Path(description="Name of a table.")]
PageToken = Annotated[str | None, Query(alias="pageToken", description="Empty for the first page.")]
PageSize = Annotated[int | None, Query(alias="pageSize", ge=1, le=PAGE_SIZE_MAX)]

_JSON: Final[dict[str, Any]] = {"content": {"application/json": {"schema": {"type": "object"}}}}
_COMMIT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["requirements", "updates"],
                    "properties": {
                        "requirements": {"type": "array", "items": {"type": "object"}},
                        "updates": {"type": "array", "items": {"type": "object"}},
                    },
                }
            }
        },
    }
}


class Warehouse(Protocol):
    """What the two warehouses have in common."""

    async def tables(self) -> Sequence[str]: ...
    async def exists(self, table: str) -> bool: ...
    async def load(self, table: str, snapshots: Snapshots) -> LoadedTable: ...


def iceberg_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=[CATALOG])
    router.include_router(_config_routes(state))
    for prefix in ("", "/lake", "/live"):
        live, metrics = prefix == "/live", state.metrics
        for made in (
            _namespace_routes(state),
            _table_routes(state, state.live, metrics.live_load_seconds)
            if live
            else _table_routes(state, state.lake, metrics.lake_load_seconds),
            _refusal_routes(state) if live else _commit_routes(state),
        ):
            # Without a prefix they are the same as with `/lake`, and described there.
            router.include_router(made, prefix=prefix, include_in_schema=prefix != "")
    return router


def _config_routes(state: GatewayState) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/config",
        summary="Configuration of an Iceberg REST client",
        responses={200: _JSON, **iceberg_errors(400, 401, 403)},
        openapi_extra=SIGNED_IN,
    )
    async def config(
        request: Request,
        warehouse: Annotated[
            str, Query(description="`lake`: committed events; `live`: all of them.")
        ] = "lake",
    ) -> Response:
        _require_reader(caller(request, state))
        if warehouse not in ("lake", "live"):
            raise InvalidRequestError(
                f"there is no warehouse {warehouse[:200]!r}: `lake` has what is committed, `live` "
                "also what was acked a moment ago"
            )
        if warehouse == "live":
            state.live.expect_loads()
        return _json(
            {
                "defaults": state.lake.config,
                "overrides": {"prefix": warehouse},
                "endpoints": READS + COMMITS if warehouse == "lake" else READS,
            }
        )

    return router


def _namespace_routes(state: GatewayState) -> APIRouter:
    router = APIRouter()
    namespace_name = state.settings.catalog_namespace

    @router.get(
        NAMESPACES,
        summary="List namespaces",
        responses={200: _JSON, **iceberg_errors(400, 401, 403, 404)},
        openapi_extra=SIGNED_IN,
    )
    async def list_namespaces(
        request: Request,
        parent: Annotated[str | None, Query(description="List those below this one.")] = None,
        page_token: PageToken = None,
        page_size: PageSize = None,
    ) -> Response:
        _require_reader(caller(request, state))
        if parent:
            _check_namespace(state, parent)
        names, token = _page([] if parent else [namespace_name], page_token, page_size)
        return _json({"namespaces": [[name] for name in names], "next-page-token": token})

    @router.get(
        NAMESPACE,
        summary="A namespace",
        responses={200: _JSON, **iceberg_errors(401, 403, 404)},
        openapi_extra=SIGNED_IN,
    )
    async def get_namespace(request: Request, namespace: Name) -> Response:
        _require_reader(caller(request, state))
        _check_namespace(state, namespace)
        return _json({"namespace": [namespace_name], "properties": {}})

    @router.head(
        NAMESPACE,
        summary="Whether a namespace exists",
        status_code=204,
        responses=iceberg_errors(401, 403, 404),
        openapi_extra=SIGNED_IN,
    )
    async def has_namespace(request: Request, namespace: Name) -> Response:
        _require_reader(caller(request, state))
        _check_namespace(state, namespace)
        return Response(status_code=204)

    return router


def _table_routes(state: GatewayState, warehouse: Warehouse, load_seconds: Histogram) -> APIRouter:
    router = APIRouter()

    @router.get(
        TABLES,
        summary="List tables",
        description="Those that the token may read.",
        responses={200: _JSON, **iceberg_errors(400, 401, 403, 404, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def list_tables(
        request: Request,
        namespace: Name,
        page_token: PageToken = None,
        page_size: PageSize = None,
    ) -> Response:
        who = caller(request, state)
        _require_reader(who)
        _check_namespace(state, namespace)
        found = [name for name in await warehouse.tables() if _may_read(who, name)]
        names, token = _page(found, page_token, page_size)
        identifiers = [{"namespace": [namespace], "name": name} for name in names]
        return _json({"identifiers": identifiers, "next-page-token": token})

    @router.get(
        TABLE,
        summary="Load a table",
        responses={
            200: {**_JSON, "headers": {"ETag": {"schema": {"type": "string"}}}},
            304: {"description": "The table is as `If-None-Match` knows it."},
            **iceberg_errors(400, 401, 403, 404, 503),
        },
        openapi_extra=SIGNED_IN,
    )
    async def load_table(
        request: Request,
        namespace: Name,
        table: Table,
        snapshots: Annotated[
            Literal["all", "refs"], Query(description="`refs`: only those with a branch or tag.")
        ] = "all",
    ) -> Response:
        _check_reader(state, request, namespace, table)
        started = time.perf_counter()
        loaded = await warehouse.load(table, snapshots)
        load_seconds.observe(time.perf_counter() - started)
        headers = {"etag": loaded.etag}
        if loaded.etag in _known_etags(request):
            return Response(status_code=304, headers=headers)
        body = load_answer(loaded.location, loaded.content, state.lake.config)
        return Response(body, headers=headers, media_type="application/json")

    @router.head(
        TABLE,
        summary="Whether a table exists",
        status_code=204,
        responses=iceberg_errors(401, 403, 404, 503),
        openapi_extra=SIGNED_IN,
    )
    async def has_table(request: Request, namespace: Name, table: Table) -> Response:
        _check_reader(state, request, namespace, table)
        if not await warehouse.exists(table):
            raise no_table(table)
        return Response(status_code=204)

    @router.post(
        METRICS,
        summary="Report of a scan or commit",
        description="Taken and not kept.",
        status_code=204,
        responses=iceberg_errors(401, 403, 404, 413),
        openapi_extra=SIGNED_IN,
    )
    async def report_metrics(request: Request, namespace: Name, table: Table) -> Response:
        _check_reader(state, request, namespace, table)
        await read_body(request, state, METRICS_BYTES_MAX)
        return Response(status_code=204)

    return router


def _commit_routes(state: GatewayState) -> APIRouter:
    router = APIRouter()

    @router.post(
        TABLE,
        summary="Commit to a table",
        description="For the pipeline role, so that Spark's procedures can maintain tables.",
        responses={200: _JSON, **iceberg_errors(400, 401, 403, 404, 409, 413, 500, 503)},
        openapi_extra={**SIGNED_IN, **_COMMIT},
    )
    async def commit(request: Request, namespace: Name, table: Table) -> Response:
        who = caller(request, state)
        _check_table(state, namespace, table)
        who.require("pipeline", table)
        body = await read_body(request, state, state.settings.max_body_mb * 2**20)
        location, content = await state.lake.commit(table, body)
        return Response(load_answer(location, content, {}), media_type="application/json")

    return router


def _refusal_routes(state: GatewayState) -> APIRouter:
    router = APIRouter()

    @router.post(
        TABLE,
        summary="Refuses every commit",
        responses=iceberg_errors(401, 403),
        openapi_extra=SIGNED_IN,
    )
    async def refuse(request: Request, namespace: Name, table: Table) -> Response:
        caller(request, state)
        raise ForbiddenError(
            f"the live view of {table[:200]!r} is read-only: send events to /tables, and commit "
            "to the warehouse `lake`",
            code="READ_ONLY",
        )

    return router


def _may_read(who: Principal, table: str | None = None) -> bool:
    """Readers, and the pipeline, which maintains what it reads."""
    return who.may("read", table) or who.may("pipeline", table)


def _require_reader(who: Principal, table: str | None = None) -> None:
    if not _may_read(who, table):
        who.require("read", table)


def _check_reader(state: GatewayState, request: Request, namespace: str, table: str) -> None:
    who = caller(request, state)
    _check_table(state, namespace, table)
    _require_reader(who, table)


def _check_table(state: GatewayState, namespace: str, table: str) -> None:
    # Spark asks for `orders.snapshots` as table `snapshots` of a namespace that is not there,
    # and reads its own metadata tables only if it is the table that is missing.
    if namespace != state.settings.catalog_namespace or TABLE_NAME.fullmatch(table) is None:
        raise no_table(table)


def _check_namespace(state: GatewayState, namespace: str) -> None:
    if namespace != state.settings.catalog_namespace:
        raise NotFoundError(
            f"there is no namespace {namespace[:200]!r}: all tables are in "
            f"{state.settings.catalog_namespace!r}",
            code="NAMESPACE_NOT_FOUND",
        )


def _page(
    names: Sequence[str], token: str | None, size: int | None
) -> tuple[Sequence[str], str | None]:
    """One page of sorted names, and the token of the next; without a token all of them."""
    if token is None:
        return names, None
    rest = [name for name in names if name > token]
    page = rest[: size or PAGE_SIZE_MAX]
    return page, page[-1] if len(page) < len(rest) else None


def _known_etags(request: Request) -> set[str]:
    given = request.headers.get("if-none-match", "")
    return {tag.strip().removeprefix("W/") for tag in given.split(",")}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
