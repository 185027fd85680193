"""The `zombi` command. Expected errors become one line and an exit code, never a traceback.

Every command is imported to show its help, so none imports anything heavy at its top.
"""

from __future__ import annotations

import sys

import typer

from zombi_platform import __version__
from zombi_platform.cli import (
    connect,
    doctor,
    flush,
    gateway,
    query,
    send,
    settings,
    spark,
    status,
    tables,
    tail,
    tokens,
    up,
)
from zombi_platform.errors import SettingsError, ZombiError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Events in, Iceberg out.")
app.command("gateway")(gateway.serve)
app.command("up")(up.up)
app.command("spark")(spark.serve)
app.command("send")(send.send)
app.command("tail")(tail.tail)
app.command("tables")(tables.tables)
app.command("query")(query.query)
app.command("connect")(connect.connect)
app.command("flush")(flush.flush)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("settings")(settings.show)
app.add_typer(tokens.app, name="token")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except ZombiError as error:
        typer.echo(f"zombi: {error}", err=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
