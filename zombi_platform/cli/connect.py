"""`zombi connect`: what to paste into an engine to read this running platform."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zombi_platform.settings import Settings


def connect(
    engine: Annotated[str, typer.Argument(help="spark, trino, duckdb or pyiceberg.")],
    cold: Annotated[
        bool, typer.Option("--cold", help="Only committed events, not those still hot.")
    ] = False,
) -> None:
    """Print the lines that connect an engine to this platform."""
    from zombi_platform.catalog.place import find_place
    from zombi_platform.cli.engine_lines import ENGINES
    from zombi_platform.client import GatewayClient

    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(ENGINES)}")
    settings = Settings.from_env(os.environ)
    with GatewayClient(settings.url, settings.token) as client:
        place = find_place(client, "lake" if cold else "live")
    typer.echo(ENGINES[engine](place, settings.token is not None))
