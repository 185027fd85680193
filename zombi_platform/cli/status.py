"""`zombi status`: how far each table has come on its way to Iceberg."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from zombi_platform.cuts import CutState
from zombi_platform.settings import Settings

if TYPE_CHECKING:
    from zombi_platform.progress import TableProgress


def status(
    tables: Annotated[list[str] | None, typer.Argument(help="Tables; default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is hot, staged and committed, the lag, and what went wrong last."""
    settings = Settings.from_env(os.environ)
    from zombi_platform.client.pipeline import PipelineClient

    with PipelineClient(settings.url, settings.token) as gateway:
        found = [one for one in gateway.tables() if not tables or one.table in tables]
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    shown = Table("table", "hot", "MB", "staged", "committed", "lag", "state", "last error")
    for column in shown.columns[1:6]:
        column.justify = "right"
    for one in found:
        shown.add_row(*_row(one))
    Console().print(shown)


def _row(one: TableProgress) -> list[str]:
    staged = sum(cut.events for cut in one.cuts if cut.state is CutState.STAGED)
    committed = sum(marks.flushed for marks in one.watermarks.values())
    return [
        one.table,
        f"{one.events:,}",
        f"{one.bytes / 2**20:,.1f}",
        f"{staged:,}",
        f"{committed:,}",
        f"{one.lag_secs:.0f} s",
        _state(one),
        "" if one.failure is None else f"{one.failure.step}: {one.failure.error}",
    ]


def _state(one: TableProgress) -> str:
    if one.failure is not None and not one.failure.transient:
        return "[red]stopped"
    if one.lease is not None:
        return f"[cyan]{one.lease.holder} at work"
    if one.reasons:
        return f"[yellow]due: {', '.join(one.reasons)}"
    return "[green]idle"
