"""`zombi tail`: the last events of a table, and with -f whatever comes after them.

Following outlives restarts of the gateway: it says so on standard error and goes on where
it was. One event is one line, whatever is in its payload.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from zombi_platform.errors import NotFoundError, TransientError
from zombi_platform.settings import Settings

if TYPE_CHECKING:
    from zombi_platform.client import Event, Tail

POLL_SECS: Final = 0.25
AWAY_SECS: Final = 1.0
LAST_MAX: Final = 10_000


def tail(
    table: str,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new events too.")] = False,
    last: Annotated[
        int, typer.Option("-n", "--last", min=0, max=LAST_MAX, help="Events to begin with.")
    ] = 10,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a line.")] = False,
) -> None:
    """Show the last events of the hot buffer; with -f go on with new ones."""
    from zombi_platform.client import GatewayClient, Tail

    settings = Settings.from_env(os.environ)
    show = _show_json if as_json else _show_text
    with GatewayClient(settings.url, settings.token) as client:
        reader = Tail(client, table, partition)
        try:
            for event in reader.last(last):
                show(event)
        except NotFoundError as error:
            if not follow:
                raise
            _notice(str(error))
        sys.stdout.flush()
        if follow:
            _follow(reader, show)


def _follow(reader: Tail, show: Callable[[Event], None]) -> None:
    away = False
    missed = 0
    while True:
        try:
            for event in reader.new():
                show(event)
            sys.stdout.flush()
            if away:
                _notice("the gateway is back")
            away = False
        except NotFoundError:
            pass  # the table begins with its first event
        except TransientError as error:
            if not away:
                _notice(f"{error}; waiting for it")
            away = True
        if reader.missed > missed:
            _notice(f"{reader.missed - missed} events left the hot buffer before they were shown")
            missed = reader.missed
        time.sleep(AWAY_SECS if away else POLL_SECS)


def _show_json(event: Event) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")


def _show_text(event: Event) -> None:
    stamp = datetime.fromtimestamp(event.timestamp_ms / 1000, UTC)
    when = stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = event.payload
    if text is None:
        text = f"{event.data!r}"
    elif not text.isprintable():
        # Control characters would act on the terminal, line ends break the line.
        text = text.encode("unicode_escape").decode("ascii")
    sys.stdout.write(f"{when} {event.partition}/{event.sequence} {text}\n")


def _notice(text: str) -> None:
    typer.echo(f"zombi: {text}", err=True)
