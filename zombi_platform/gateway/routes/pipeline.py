"""The way to Iceberg, for workers: what is due, leases, cuts, splits, commits, cleaning.

Every route may be called again after a lost answer. Those that change something name the
epoch of the caller's lease, so that a worker that was replaced is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import Meta

from zombi_platform.cuts import Cut, StagedFile
from zombi_platform.errors import InvalidRequestError
from zombi_platform.events import COLUMNS, SEQUENCE_MAX, check_table
from zombi_platform.gateway.openapi import MOVING, SIGNED_IN, errors, json_body
from zombi_platform.gateway.reads import arrow_chunks, slices
from zombi_platform.gateway.requests import caller, decode_body
from zombi_platform.gateway.routes.parameters import TableName
from zombi_platform.gateway.routes.reads import ARROW_TYPE, OpenResponse
from zombi_platform.gateway.state import GatewayState
from zombi_platform.hot.buffer import Reading
from zombi_platform.hot.notes import Failure, Registration
from zombi_platform.progress import Cleaned, Committed, Progress

BODY_BYTES_MAX: Final = 64 * 2**20
PATHS_MAX: Final = 100_000
EPOCH_HEADER: Final = "X-Zombi-Epoch"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=16_384)]
FilePath = Annotated[str, Meta(min_length=1, max_length=2048)]
Epoch = Annotated[int, Meta(ge=1, le=SEQUENCE_MAX)]
CutId = Annotated[int, Path(ge=1, le=SEQUENCE_MAX, description="Number of a cut.")]
SplitNumber = Annotated[int, Path(ge=0, le=2**31 - 1, description="Number of a split of the cut.")]


class TakeLease(msgspec.Struct):
    holder: Name
    epoch: Epoch | None = None
    """Of the lease to renew; None takes a new one."""


class Intent(msgspec.Struct):
    paths: Annotated[list[FilePath], Meta(max_length=PATHS_MAX)]


class StagedSplit(msgspec.Struct):
    files: Annotated[list[StagedFile], Meta(max_length=PATHS_MAX)]


class CommittedCuts(msgspec.Struct):
    cuts: Annotated[list[Epoch], Meta(min_length=1, max_length=PATHS_MAX)]


class ReportFailure(msgspec.Struct):
    error: Text
    code: Name
    step: Name
    transient: bool
    run_id: Text | None = None
    url: Text | None = None


class ReportRegistration(msgspec.Struct):
    snapshot_id: Annotated[int, Meta(ge=-SEQUENCE_MAX, le=SEQUENCE_MAX)] | None = None
    error: Text | None = None


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    epoch: int
    ttl_secs: int


@dataclass(frozen=True, slots=True)
class CutAnswer:
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class CutsAnswer:
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    kept: bool
    files: tuple[StagedFile, ...]


@dataclass(frozen=True, slots=True)
class Done:
    status: str = "ok"


EPOCH: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": EPOCH_HEADER,
            "in": "header",
            "required": True,
            "description": "Epoch of the caller's lease; another one than the current gets 409.",
            "schema": {"type": "integer", "minimum": 1},
        }
    ]
}
REFUSALS: Final = (400, 401, 403, 404, 409, 413, 503)


def epoch_of(request: Request) -> int:
    """The epoch that a change must name."""
    text = request.headers.get(EPOCH_HEADER)
    if text is None:
        raise InvalidRequestError(
            f"the header {EPOCH_HEADER} is missing: take a lease and send its epoch"
        )
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 19):
        raise InvalidRequestError(f"{EPOCH_HEADER} {text[:40]!r} is not the epoch of a lease")
    return int(text)


def worker(request: Request, state: GatewayState, table: str) -> None:
    """Raise unless the caller may work on the table; remember that it called."""
    caller(request, state).require("pipeline", check_table(table))
    state.pipeline.called()


def to_json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def pipeline_routes(state: GatewayState) -> APIRouter:
    router = APIRouter(prefix="/pipeline/tables", tags=[MOVING])
    _add_progress(router, state)
    _add_lease(router, state)
    _add_cuts(router, state)
    _add_splits(router, state)
    _add_commit(router, state)
    _add_reports(router, state)
    return router


def _add_progress(router: APIRouter, state: GatewayState) -> None:
    @router.get(
        "",
        summary="How far each table has come, and what is due",
        response_class=Response,
        responses={200: {"model": Progress}, **errors(400, 401, 403, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def list_progress(
        request: Request,
        watcher: Annotated[
            str | None,
            Query(
                max_length=256,
                description="Who starts the work that is due; whoever only looks says nothing.",
            ),
        ] = None,
    ) -> Response:
        who = caller(request, state)
        who.require("pipeline")
        if watcher is not None:
            state.pipeline.called()
        tables = [name for name in state.pipeline.tables() if who.may("pipeline", name)]
        loop = asyncio.get_running_loop()
        count = state.pipeline.count_tombstones
        doomed = await loop.run_in_executor(state.readers, count, tables)
        found = tuple(state.pipeline.progress(table, doomed[table]) for table in tables)
        return to_json(Progress(found))


def _add_lease(router: APIRouter, state: GatewayState) -> None:
    pipeline = state.pipeline

    @router.post(
        "/{table}/lease",
        summary="Take or renew a table's lease",
        description="The same holder gets the same epoch again; another one gets 409 "
        "`LEASE_HELD` until the term is over.",
        response_class=Response,
        responses={200: {"model": LeaseAnswer}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **json_body(TakeLease)},
    )
    async def take_lease(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        body = await decode_body(request, state, TakeLease, BODY_BYTES_MAX)
        epoch = await pipeline.leases.take(table, body.holder, body.epoch)
        return to_json(LeaseAnswer(epoch, state.settings.lease_secs))

    @router.delete(
        "/{table}/lease",
        summary="Give a lease back",
        response_class=Response,
        responses={200: {"model": Done}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH},
    )
    async def release_lease(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        await pipeline.leases.release(table, epoch_of(request))
        return to_json(Done())


def _add_cuts(router: APIRouter, state: GatewayState) -> None:
    pipeline = state.pipeline

    @router.post(
        "/{table}/cuts",
        summary="Open a cut",
        description="The open cut if there is one, else a new one of everything that is in "
        "none; null when nothing is new.",
        response_class=Response,
        responses={200: {"model": CutAnswer}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH},
    )
    async def open_cut(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        limits = pipeline.split_limits(table)
        cut = await pipeline.cuts.open(table, epoch_of(request), limits)
        if cut is None:
            return to_json(CutAnswer(None))
        pieces = _framed(b'{"cut":', pipeline.cuts.one_json(table, cut))
        return _streamed(state, pieces, "application/json")

    @router.get(
        "/{table}/cuts",
        summary="Cuts that are not cleaned yet, oldest first",
        response_class=Response,
        responses={200: {"model": CutsAnswer}, **errors(400, 401, 403, 503)},
        openapi_extra=SIGNED_IN,
    )
    async def list_cuts(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        pieces = _framed(b'{"cuts":', pipeline.cuts.json(table))
        return _streamed(state, pieces, "application/json")


def _add_splits(router: APIRouter, state: GatewayState) -> None:
    pipeline = state.pipeline
    path = "/{table}/cuts/{cut}/splits/{split}"

    @router.get(
        path,
        summary="The events of a split",
        response_class=Response,
        responses={
            200: {"content": {ARROW_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
            **errors(400, 401, 403, 404, 503),
        },
        openapi_extra=SIGNED_IN,
    )
    async def read_split(
        request: Request, table: TableName, cut: CutId, split: SplitNumber
    ) -> Response:
        worker(request, state, table)
        loop = asyncio.get_running_loop()
        batches = await loop.run_in_executor(
            state.readers, pipeline.cuts.read_split, table, cut, split
        )
        pieces = (piece for piece, _ in arrow_chunks(Reading(batches, False), COLUMNS.names))
        return _streamed(state, pieces, ARROW_TYPE)

    @router.post(
        path + "/intent",
        summary="Announce files that are about to be written",
        description="They are deleted after a while unless they are reported.",
        response_class=Response,
        responses={200: {"model": Done}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH, **json_body(Intent)},
    )
    async def announce_files(
        request: Request, table: TableName, cut: CutId, split: SplitNumber
    ) -> Response:
        worker(request, state, table)
        epoch = epoch_of(request)
        body = await decode_body(request, state, Intent, BODY_BYTES_MAX)
        await pipeline.cuts.intend(table, epoch, cut, split, body.paths)
        return to_json(Done())

    @router.put(
        path,
        summary="Report a split's files",
        description="The first report is kept; a later one of other files gets `kept` false "
        "and the files of the first, and its own are deleted after a while.",
        response_class=Response,
        responses={200: {"model": SplitAnswer}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH, **json_body(StagedSplit)},
    )
    async def report_split(
        request: Request, table: TableName, cut: CutId, split: SplitNumber
    ) -> Response:
        worker(request, state, table)
        epoch = epoch_of(request)
        body = await decode_body(request, state, StagedSplit, BODY_BYTES_MAX)
        reported = await pipeline.cuts.report(table, epoch, cut, split, body.files)
        return to_json(reported)


def _add_commit(router: APIRouter, state: GatewayState) -> None:
    pipeline = state.pipeline

    @router.post(
        "/{table}/commit",
        summary="Report that cuts are committed",
        description="The gateway looks into the catalog itself: 409 `NOT_IN_LAKE`, or what "
        "else is wrong, when it does not find them there.",
        response_class=Response,
        responses={200: {"model": Committed}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH, **json_body(CommittedCuts)},
    )
    async def report_commit(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        epoch = epoch_of(request)
        body = await decode_body(request, state, CommittedCuts, BODY_BYTES_MAX)
        return to_json(await pipeline.commit(table, epoch, body.cuts))

    @router.post(
        "/{table}/clean",
        summary="Delete hot events that are committed and past their retention",
        description="The gateway looks into the catalog again before it deletes.",
        response_class=Response,
        responses={200: {"model": Cleaned}, **errors(*REFUSALS)},
        openapi_extra={**SIGNED_IN, **EPOCH},
    )
    async def clean(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        return to_json(await pipeline.clean(table, epoch_of(request)))


def _add_reports(router: APIRouter, state: GatewayState) -> None:
    notes = state.pipeline.notes

    @router.post(
        "/{table}/failure",
        summary="Tell what stopped a run",
        description="Shown until the next commit or cleaning of the table.",
        response_class=Response,
        responses={200: {"model": Done}, **errors(400, 401, 403, 413, 503)},
        openapi_extra={**SIGNED_IN, **json_body(ReportFailure)},
    )
    async def report_failure(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        told = await decode_body(request, state, ReportFailure, BODY_BYTES_MAX)
        note = Failure(
            error=told.error,
            code=told.code,
            step=told.step,
            transient=told.transient,
            at_ms=_now_ms(),
            run_id=told.run_id,
            url=told.url,
        )
        await notes.put(table, note)
        return to_json(Done())

    @router.post(
        "/{table}/registration",
        summary="Tell how far an external catalog has followed",
        response_class=Response,
        responses={200: {"model": Done}, **errors(400, 401, 403, 413, 503)},
        openapi_extra={**SIGNED_IN, **json_body(ReportRegistration)},
    )
    async def report_registration(request: Request, table: TableName) -> Response:
        worker(request, state, table)
        told = await decode_body(request, state, ReportRegistration, BODY_BYTES_MAX)
        await notes.put(table, Registration(told.snapshot_id, _now_ms(), told.error))
        return to_json(Done())


def _framed(head: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from pieces
    yield b"}"


def _streamed(state: GatewayState, pieces: Iterator[bytes], media_type: str) -> Response:
    """Draw from the database in a reader thread, as fast as the caller takes it."""
    state.open_reads.enter()
    return OpenResponse(state, _slices(state, pieces), {}, media_type)


async def _slices(state: GatewayState, pieces: Iterator[bytes]) -> AsyncIterator[memoryview]:
    loop = asyncio.get_running_loop()
    while (piece := await loop.run_in_executor(state.readers, next, pieces, None)) is not None:
        for part in slices(piece):
            yield part


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
