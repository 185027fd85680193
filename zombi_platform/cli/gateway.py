"""`zombi gateway`: the gateway in the foreground."""

from __future__ import annotations

import os

import typer

from zombi_platform.failpoints import arm
from zombi_platform.settings import Settings, remarks


def serve() -> None:
    """Run the gateway until SIGTERM or Ctrl-C; configured by ZOMBI_ variables."""
    settings = Settings.from_env(os.environ)
    arm(settings.failpoints)
    for remark in remarks(os.environ):
        typer.echo(f"zombi: {remark}", err=True)
    # Here and not above: other commands start without the web server's imports.
    from zombi_platform.gateway.server import run

    raise typer.Exit(run(settings))
