"""`zombi up`: the whole platform on this machine, in the foreground."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from zombi_platform.errors import StartupError
from zombi_platform.settings import Settings, remarks

if TYPE_CHECKING:
    from zombi_platform.supervisor.running import HomeLock
    from zombi_platform.supervisor.services import Plan

OVERVIEW_WIDTH_MIN: Final = 120


def up(
    engine: Literal["spark", "arrow"] | None = typer.Option(
        None, help="What writes Parquet; as ZOMBI_ENGINE."
    ),
    dagster: bool = typer.Option(True, "--dagster/--no-dagster", help="Run the pipeline too."),
) -> None:
    """Run gateway, Spark and Dagster until Ctrl-C; configured by ZOMBI_ variables."""
    # Here and not above: other commands start without what only this one needs.
    from zombi_platform.supervisor.running import HomeLock
    from zombi_platform.supervisor.services import make_plan

    settings = Settings.from_env(os.environ)
    if engine is not None:
        settings = dataclasses.replace(settings, engine=engine)
    for remark in remarks(os.environ):
        _say(remark)
    lock = HomeLock(settings.data_dir.resolve())
    try:
        settings = _claim_ports(settings, dagster)
        plan = make_plan(settings, os.environ, dagster=dagster)
        _say(plan.remark)
        asyncio.run(_supervise(plan, lock))
    finally:
        lock.close()


async def _supervise(plan: Plan, lock: HomeLock) -> None:
    from zombi_platform.supervisor.supervision import Supervisor

    def started() -> None:
        lock.tell({service.name: service.address for service in plan.services})
        console = Console()
        # A pipe or a log has no width of its own, and links must not be cut.
        console.width = max(console.width, OVERVIEW_WIDTH_MIN)
        console.print(_overview(plan))

    await Supervisor(plan, lock.fd, _say).run(started)


def _overview(plan: Plan) -> Table:
    table = Table("what", "where", "", title="zombi is up; Ctrl-C stops it", title_justify="left")
    for service in plan.services:
        table.add_row(service.name, service.address, service.purpose)
    table.add_row("data", str(plan.home), "hot buffer, Dagster's history, a local lake")
    table.add_row("logs", str(plan.home / "logs"), "one file per service")
    return table


def _claim_ports(settings: Settings, dagster: bool) -> Settings:
    """The settings with free ports where 0 was asked for; taken ones are named."""
    from zombi_platform.supervisor.services import LOOPBACK, needs_spark_server

    wanted = {"port": settings.host}
    if needs_spark_server(settings):
        wanted["spark_port"] = LOOPBACK
    if dagster:
        wanted["dagster_port"] = LOOPBACK
    chosen: dict[str, Any] = {}
    taken = []
    for name, host in wanted.items():
        port = getattr(settings, name)
        try:
            chosen[name] = _bindable(host, port)
        except OSError as error:
            taken.append(f"{host}:{port} (ZOMBI_{name.upper()}): {error.strerror or error}")
    if taken:
        raise StartupError(f"cannot listen on {', '.join(taken)}; stop what uses it or change it")
    return dataclasses.replace(settings, **chosen)


def _bindable(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    typer.echo(f"zombi: {text}", err=True)
