"""`zombi settings`: every variable, its value in force and its meaning."""

from __future__ import annotations

import os
from dataclasses import fields

import typer

from zombi_platform.settings import Settings, render_env_example, render_table, variable


def show(
    markdown: bool = typer.Option(False, "--markdown", help="Print docs/configuration.md's table."),
    env: bool = typer.Option(False, "--env", help="Print .env.example."),
) -> None:
    """Show all settings."""
    if markdown or env:
        typer.echo(render_table() if markdown else render_env_example(), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    settings = Settings.from_env(os.environ)
    table = Table("variable", "value", "meaning")
    for spec in fields(Settings):
        value = getattr(settings, spec.name)
        hidden = spec.metadata.get("secret") and value is not None
        table.add_row(variable(spec), "(hidden)" if hidden else str(value), spec.metadata["doc"])
    Console().print(table)
