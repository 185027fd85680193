"""`zombi token`: make, list and revoke tokens. A token is printed once; its hash is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zombi_platform.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke tokens.")

File = Annotated[
    Path | None,
    typer.Option("--file", help="Tokens file; default ZOMBI_TOKENS_FILE, else in ZOMBI_DATA_DIR."),
]


def _file(given: Path | None) -> Path:
    from zombi_platform.gateway.tokens import TOKENS_FILE_NAME

    settings = Settings.from_env(os.environ)
    return given or settings.tokens_file or settings.data_dir / TOKENS_FILE_NAME


@app.command("create")
def create(
    name: str,
    role: Annotated[list[str], typer.Option(help="produce, read, pipeline or admin; repeatable.")],
    table: Annotated[list[str] | None, typer.Option(help="Limit to this table.")] = None,
    file: File = None,
) -> None:
    """Make a token and print it; it is not shown again."""
    from zombi_platform.gateway.tokens import create_token

    path = _file(file)
    typer.echo(create_token(path, name, role, table))
    typer.echo(f"kept in {path}; the gateway reads it as ZOMBI_TOKENS_FILE={path}", err=True)


@app.command("list")
def list_all(file: File = None) -> None:
    """List the tokens."""
    from rich.console import Console
    from rich.table import Table

    from zombi_platform.gateway.tokens import list_tokens

    table = Table("id", "name", "roles", "tables", "created")
    for token in list_tokens(_file(file)):
        tables = "every" if token.tables is None else ", ".join(token.tables)
        table.add_row(token.id, token.name, ", ".join(token.roles), tables, token.created)
    Console().print(table)


@app.command("revoke")
def revoke(id_or_name: str, file: File = None) -> None:
    """Revoke a token by its id or name."""
    from zombi_platform.gateway.tokens import revoke_token

    token = revoke_token(_file(file), id_or_name)
    typer.echo(f"revoked {token.name} ({token.id})", err=True)
