"""`zombi spark`: the Spark Connect server of this machine in the foreground."""

from __future__ import annotations

import os

import typer

from zombi_platform.settings import Settings


def serve() -> None:
    """Run a warm Spark server until SIGTERM or Ctrl-C; configured by ZOMBI_SPARK_ variables."""
    settings = Settings.from_env(os.environ)
    # Here and not above: other commands start without what only Spark needs.
    from zombi_platform.engines.spark.server import run

    raise typer.Exit(run(settings, os.environ))
