"""`zombi send`: events from a file or standard input to a table."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal, cast

import typer

from zombi_platform.errors import InvalidRequestError
from zombi_platform.settings import Settings

if TYPE_CHECKING:
    from zombi_platform.cli.records import Addressing
    from zombi_platform.client import Producer

PROGRESS_EVERY_SECS: Final = 0.1

Format = Literal["auto", "records", "lines"]


def send(
    table: str,
    file: Annotated[
        Path | None,
        typer.Argument(help="File, also gzip (.gz); without it, or `-`, standard input."),
    ] = None,
    shape: Annotated[
        Format,
        typer.Option(
            "--format",
            help="`records`: each line is a JSON record of the API. `lines`: each line is a "
            "payload. `auto`: records if the first line is one, else lines.",
        ),
    ] = "auto",
    partition: Annotated[int, typer.Option(min=0, help="Partition of events that name none.")] = 0,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Spread events that name none over so many: by key, without one in turn."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Most events in one request.")] = 10_000,
    key_field: Annotated[
        str | None,
        typer.Option(help="Field of the payload (a JSON object) that is its idempotency key."),
    ] = None,
    key_prefix: Annotated[
        str | None,
        typer.Option(
            help="Key of events without one: this and the line number. Sending the same file "
            "with the same prefix again within ZOMBI_IDEMPOTENCY_WINDOW_SECS adds nothing."
        ),
    ] = None,
    give_up_secs: Annotated[
        float, typer.Option(min=0, help="How long to retry while the gateway is away.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Summary as JSON.")] = False,
) -> None:
    """Send events, one a line; they are durable when this ends without an error."""
    from zombi_platform.cli.records import Addressing
    from zombi_platform.client import GatewayClient, Producer

    settings = Settings.from_env(os.environ)
    if file == Path("-"):
        file = None
    if partition and partitions is not None:
        raise InvalidRequestError("--partition and --partitions contradict each other")
    addressing = Addressing(partition, partitions, key_field, key_prefix)
    with GatewayClient(settings.url, settings.token) as client:
        client.health()  # says at once that nothing answers; later faults are retried
    producer = Producer(
        settings.url, table, token=settings.token, batch_events=batch, delivery_secs=give_up_secs
    )
    started = time.monotonic()
    size = 0
    try:
        with producer, _opened(file) as source, _progress(file, source, producer) as advance:
            for length in _pump(producer, source.lines, shape, addressing):
                size += length
                advance()
    finally:
        summary = _Summary(table, producer.acked, size, time.monotonic() - started)
        failing = sys.exc_info()[0] is not None
        typer.echo(summary.as_json() if as_json else summary.as_text(), err=failing)


def _pump(
    producer: Producer, stream: BinaryIO, shape: Format, addressing: Addressing
) -> Iterator[int]:
    """Send line by line until one fails; yields the bytes of each payload."""
    from zombi_platform.cli.records import detect, outgoing, read_lines

    for number, line in read_lines(stream):
        if shape == "auto":
            shape = detect(line)
        event = outgoing(number, line, shape, addressing)
        producer.send(
            event.payload,
            partition=event.partition,
            key=event.key,
            timestamp_ms=event.timestamp_ms,
            headers=event.headers,
        )
        yield len(event.payload)
        if producer.failed:
            return  # closing the producer says why


@dataclass(frozen=True, slots=True)
class _Source:
    """The lines, and the file below them whose position is the progress."""

    lines: BinaryIO
    file: BinaryIO | None


@contextlib.contextmanager
def _opened(file: Path | None) -> Iterator[_Source]:
    if file is None:
        yield _Source(sys.stdin.buffer, None)
        return
    try:
        with file.open("rb") as raw:
            if file.suffix == ".gz":
                with gzip.open(raw) as unpacked:
                    yield _Source(cast(BinaryIO, unpacked), raw)
            else:
                yield _Source(raw, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequestError(f"cannot read {file}: {error}") from error


@contextlib.contextmanager
def _progress(
    file: Path | None, source: _Source, producer: Producer
) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; what is yielded is called for every event."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    total = file.stat().st_size if file is not None else None
    started = shown = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance() -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown < PROGRESS_EVERY_SECS:
                return
            shown = now
            done = producer.acked
            text = f"{done:,} events, {done / (now - started):,.0f}/s"
            place = source.file.tell() if source.file is not None else 0
            bar.update(task, completed=place, description=text)

        yield advance


@dataclass(frozen=True, slots=True)
class _Summary:
    table: str
    events: int
    bytes: int
    secs: float

    def as_text(self) -> str:
        rate = self.events / self.secs if self.secs else 0.0
        return f"{self.events:,} events stored in {self.table}, {self.secs:.1f} s, {rate:,.0f}/s"

    def as_json(self) -> str:
        import json

        rate = self.events / self.secs if self.secs else 0.0
        return json.dumps(
            {
                "table": self.table,
                "events": self.events,
                "bytes_read": self.bytes,
                "secs": round(self.secs, 3),
                "events_per_sec": round(rate, 1),
            }
        )
