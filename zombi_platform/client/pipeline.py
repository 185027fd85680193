"""The pipeline's calls to the gateway, typed, one method for each route.

Every call may be repeated after a fault. Errors come as the classes of the error tree:
`FencedError` tells a worker that another one has taken over, `TransientError`s that a
retry may help. Runs wherever a split is staged, so it needs httpx, msgspec and pyarrow alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, Final, Self
from urllib.parse import quote

import httpx
import msgspec
import pyarrow as pa

from zombi_platform.client.calls import GatewayClient, decode
from zombi_platform.cuts import Cut, StagedFile
from zombi_platform.errors import GatewayUnreachableError
from zombi_platform.progress import (
    Cleaned,
    Committed,
    Due,
    FlushAnswer,
    Progress,
    TableProgress,
)

EPOCH_HEADER: Final = "X-Zombi-Epoch"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a table; `epoch` goes with every change."""

    table: str
    holder: str
    epoch: int
    ttl_secs: float


@dataclass(frozen=True, slots=True)
class ReportedSplit:
    """Whose files the gateway has for a split; if not ours, ours are to be deleted."""

    kept: bool
    files: tuple[StagedFile, ...]


class _Lease(msgspec.Struct):
    epoch: int
    ttl_secs: float


class _Cut(msgspec.Struct):
    cut: Cut | None


class _Cuts(msgspec.Struct):
    cuts: list[Cut]


class PipelineClient:
    """A connection to one gateway; safe to share between threads."""

    def __init__(self, url: str, token: str | None = None, *, timeout_secs: float = 60.0) -> None:
        self._gateway = GatewayClient(url, token, timeout_secs=timeout_secs)

    # What is due

    def tables(self, watcher: str | None = None) -> tuple[TableProgress, ...]:
        """How far each table has come. A watcher is one who starts the work that is due."""
        params = {} if watcher is None else {"watcher": watcher}
        return decode(self._request("GET", "/pipeline/tables", params=params), Progress).tables

    # Leases

    def lease(self, table: str, holder: str, epoch: int | None = None) -> Lease:
        """Take the table's lease, or renew the one of this epoch."""
        body = {"holder": holder, "epoch": epoch}
        answer = decode(self._request("POST", f"{_path(table)}/lease", body=body), _Lease)
        return Lease(table, holder, answer.epoch, answer.ttl_secs)

    def renew(self, lease: Lease) -> Lease:
        return self.lease(lease.table, lease.holder, lease.epoch)

    def release(self, lease: Lease) -> None:
        self._request("DELETE", f"{_path(lease.table)}/lease", epoch=lease.epoch)

    # Cuts

    def open_cut(self, table: str, epoch: int) -> Cut | None:
        """The open cut, or a new one of everything that is in none; None if there is nothing."""
        return decode(self._request("POST", f"{_path(table)}/cuts", epoch=epoch), _Cut).cut

    def cuts(self, table: str) -> list[Cut]:
        """All cuts that are not cleaned yet, oldest first, with their files."""
        return decode(self._request("GET", f"{_path(table)}/cuts"), _Cuts).cuts

    @contextmanager
    def read_split(self, table: str, cut_id: int, split: int) -> Iterator[Iterator[pa.RecordBatch]]:
        """The events of a split, batch by batch as they are drawn."""
        path = _split_path(table, cut_id, split)
        with self._gateway.stream(path) as body:
            yield _batches(body)

    def intend(self, table: str, epoch: int, cut_id: int, split: int, paths: Sequence[str]) -> None:
        """Announce files that are about to be written; those not reported are deleted."""
        path = f"{_split_path(table, cut_id, split)}/intent"
        self._request("POST", path, epoch=epoch, body={"paths": list(paths)})

    def report_split(
        self, table: str, epoch: int, cut_id: int, split: int, files: Sequence[StagedFile]
    ) -> ReportedSplit:
        """Report the files of a split; the first report of a split is kept."""
        path = _split_path(table, cut_id, split)
        answer = self._request("PUT", path, epoch=epoch, body={"files": list(files)})
        return decode(answer, ReportedSplit)

    # Commits

    def report_commit(self, table: str, epoch: int, cuts: Sequence[int]) -> Committed:
        """Have the gateway find the cuts in the lake and record them as committed."""
        path = f"{_path(table)}/commit"
        answer = self._request("POST", path, epoch=epoch, body={"cuts": list(cuts)})
        return decode(answer, Committed)

    def clean(self, table: str, epoch: int) -> Cleaned:
        """Delete hot events that are in Iceberg and past their retention."""
        return decode(self._request("POST", f"{_path(table)}/clean", epoch=epoch), Cleaned)

    def request_flush(self, table: str, wait_secs: float = 30.0) -> FlushAnswer:
        """Ask for everything acked so far to be committed, and wait for it."""
        path = f"/tables/{quote(table, safe='')}/flush"
        answer = self._request(
            "POST", path, params={"wait_secs": wait_secs}, timeout_secs=wait_secs + 10.0
        )
        return decode(answer, FlushAnswer)

    # Tombstones

    def tombstones(self, table: str, after: str | None = None, limit: int = 1000) -> Due:
        """A page of those whose time has come; `next` leads to the page after it."""
        params: dict[str, str | float] = {"limit": limit}
        if after is not None:
            params["after"] = after
        return decode(self._request("GET", f"{_path(table)}/tombstones", params=params), Due)

    def add_tombstones(
        self,
        table: str,
        epoch: int,
        paths: Sequence[str] = (),
        prefixes: Sequence[str] = (),
        grace_secs: float | None = None,
    ) -> None:
        body = {"paths": list(paths), "prefixes": list(prefixes), "grace_secs": grace_secs}
        self._request("POST", f"{_path(table)}/tombstones", epoch=epoch, body=body)

    def drop_tombstones(
        self, table: str, epoch: int, paths: Sequence[str] = (), prefixes: Sequence[str] = ()
    ) -> None:
        body = {"paths": list(paths), "prefixes": list(prefixes)}
        self._request("DELETE", f"{_path(table)}/tombstones", epoch=epoch, body=body)

    # Reports

    def report_failure(
        self,
        table: str,
        error: str,
        code: str,
        step: str,
        *,
        transient: bool,
        run_id: str | None = None,
        url: str | None = None,
    ) -> None:
        """Tell what stopped a run; shown until the next commit or cleaning."""
        body = {"error": error, "code": code, "step": step, "transient": transient}
        body |= {"run_id": run_id, "url": url}
        self._request("POST", f"{_path(table)}/failure", body=body)

    def report_registration(
        self, table: str, snapshot_id: int | None, error: str | None = None
    ) -> None:
        """Tell the last commit of events an external catalog has, and what keeps it from more."""
        body = {"snapshot_id": snapshot_id, "error": error}
        self._request("POST", f"{_path(table)}/registration", body=body)

    # The connection

    def close(self) -> None:
        self._gateway.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        epoch: int | None = None,
        body: Any = None,
        params: Mapping[str, str | float] | None = None,
        timeout_secs: float | None = None,
    ) -> httpx.Response:
        return self._gateway.request(
            method,
            path,
            params=params,
            content=None if body is None else msgspec.json.encode(body),
            headers={} if epoch is None else {EPOCH_HEADER: str(epoch)},
            timeout_secs=timeout_secs,
        )


class _Body:
    """The body of an answer as Arrow likes to read it: straight into memory of its own pool,
    which keeps pages for the next batch where `bytes` would fault them in anew."""

    closed = False

    def __init__(self, answer: HTTPResponse) -> None:
        self._answer = answer

    def read(self, size: int) -> bytes:
        return self._answer.read(size)

    def read_buffer(self, size: int) -> pa.Buffer:
        buffer = pa.allocate_buffer(size)
        view = memoryview(buffer)
        filled = 0
        while filled < size and (count := self._answer.readinto(view[filled:])):
            filled += count
        return buffer.slice(0, filled)


def _batches(answer: HTTPResponse) -> Iterator[pa.RecordBatch]:
    """The batches of a stream that must end with Arrow's own mark: a shorter one is torn."""
    try:
        with pa.ipc.open_stream(pa.PythonFile(_Body(answer), mode="r")) as reader:
            yield from reader
    except (pa.ArrowInvalid, OSError, HTTPException) as error:
        raise GatewayUnreachableError(f"the events of a split ended early: {error}") from error


def _path(table: str) -> str:
    return f"/pipeline/tables/{quote(table, safe='')}"


def _split_path(table: str, cut_id: int, split: int) -> str:
    return f"{_path(table)}/cuts/{cut_id}/splits/{split}"
