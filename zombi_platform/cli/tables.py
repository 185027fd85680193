"""`zombi tables`: what the hot buffer holds."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zombi_platform.settings import Settings


def tables(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the tables of the hot buffer."""
    from zombi_platform.client import GatewayClient

    settings = Settings.from_env(os.environ)
    with GatewayClient(settings.url, settings.token) as client:
        found = client.tables()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode({"tables": found}).decode())
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Column, Table

    numbers = [Column(name, justify="right") for name in ("partitions", "events", "size")]
    shown = Table("table", *numbers, Column("oldest not in Iceberg", justify="right"))
    for table in found:
        age = _age(table.oldest_unflushed_secs)
        shown.add_row(
            table.table, f"{table.partitions:,}", f"{table.events:,}", decimal(table.bytes), age
        )
    Console().print(shown)


def _age(secs: float | None) -> str:
    """Two units are enough to tell whether to worry."""
    if secs is None:
        return "none"
    whole = int(secs)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
