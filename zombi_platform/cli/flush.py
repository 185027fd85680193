"""`zombi flush`: bring what is hot into Iceberg now, without Dagster."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from zombi_platform.errors import ZombiError
from zombi_platform.failpoints import arm
from zombi_platform.settings import Settings

if TYPE_CHECKING:
    from zombi_platform.pipeline import Flushed, Pipeline


def flush(
    tables: Annotated[list[str] | None, typer.Argument(help="Tables; default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stage, commit, verify and clean everything that is hot now, and merge small files."""
    settings = Settings.from_env(os.environ)
    arm(settings.failpoints)
    # Here and not above: other commands start without the engines' imports.
    from zombi_platform.pipeline import Pipeline

    done: list[Flushed] = []
    failed: list[tuple[str, ZombiError]] = []
    with Pipeline.opened(settings) as pipeline:
        names = tables or [state.table for state in pipeline.gateway.tables()]
        with _progress() as progress:
            for name in names:
                try:
                    done.append(_flush_one(pipeline, name, progress))
                except ZombiError as error:
                    failed.append((name, error))
    _print_json(done, failed) if as_json else _print_table(done, failed)
    if failed:
        raise typer.Exit(1)


def _flush_one(pipeline: Pipeline, name: str, progress: Progress) -> Flushed:
    from zombi_platform.cuts import Cut
    from zombi_platform.engines import SplitResult
    from zombi_platform.pipeline import Watch

    task = progress.add_task(name, total=None, step="waiting")

    class Bar(Watch):
        """Shows events staged of events cut."""

        total = 0

        def step(self, table: str, name: str) -> None:
            progress.update(task, step=name)

        def cut(self, cut: Cut) -> None:
            self.total += sum(split.events for split in cut.missing)
            progress.update(task, total=self.total)

        def split(self, result: SplitResult) -> None:
            progress.advance(task, sum(file.events for file in result.files))

    try:
        flushed = pipeline.flush(name, Bar())
    except ZombiError:
        progress.update(task, step="[red]failed")
        raise
    progress.update(task, total=flushed.events, completed=flushed.events, step="[green]done")
    return flushed


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[step]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not Console(stderr=True).is_terminal,
    )


def _print_json(done: list[Flushed], failed: list[tuple[str, ZombiError]]) -> None:
    errors = [{"table": name, "error": str(error), "code": error.code} for name, error in failed]
    body = {"flushed": [asdict(flushed) for flushed in done], "failed": errors}
    typer.echo(msgspec.json.encode(body).decode())


def _print_table(done: list[Flushed], failed: list[tuple[str, ZombiError]]) -> None:
    table = Table("table", "events", "files", "MB", "snapshot", "still hot", "merged", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for flushed in done:
        table.add_row(
            flushed.table,
            f"{flushed.events:,}",
            f"{flushed.files:,}",
            f"{flushed.bytes / 2**20:,.1f}",
            str(flushed.snapshot_id or "-"),
            f"{flushed.remaining_events:,}",
            f"{flushed.merged_files:,}",
            f"{flushed.seconds:.1f}",
        )
    Console().print(table)
    for name, error in failed:
        typer.echo(f"zombi: {name}: {error}", err=True)
