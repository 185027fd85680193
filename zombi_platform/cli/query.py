"""`zombi query`: SQL over every event, with DuckDB on the platform's own catalog."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from zombi_platform.errors import RejectedError
from zombi_platform.settings import Settings

if TYPE_CHECKING:
    import duckdb

ROWS_AT_ONCE: Final = 1000
SHOWN_ROWS_MAX: Final = 10_000


def query(
    sql: Annotated[str, typer.Argument(help="A query; tables go by their names.")],
    cold: Annotated[
        bool, typer.Option("--cold", help="Only committed events, not those still hot.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header.")] = False,
) -> None:
    """Query the tables with DuckDB, every acked event included."""
    if as_json and as_csv:
        raise typer.BadParameter("choose --json or --csv")
    import duckdb

    from zombi_platform.catalog.duckdb import iceberg_duckdb, use_tables
    from zombi_platform.catalog.place import find_place
    from zombi_platform.client import GatewayClient

    settings = Settings.from_env(os.environ)
    with GatewayClient(settings.url, settings.token) as client:
        place = find_place(client, "lake" if cold else "live")
    try:
        with iceberg_duckdb() as connection:
            use_tables(connection, place, settings.token)
            result = connection.execute(sql)
            show = _show_json if as_json else _show_csv if as_csv else _show_table
            show([column[0] for column in result.description or ()], _rows(result))
    except duckdb.Error as error:
        raise RejectedError(str(error), code="QUERY_FAILED") from error


def _rows(result: duckdb.DuckDBPyConnection) -> Iterator[list[Any]]:
    while rows := result.fetchmany(ROWS_AT_ONCE):
        for row in rows:
            yield [_readable(value) for value in row]


def _readable(value: Any) -> Any:
    """Payloads are bytes, mostly of text; those that are not are shown as hex."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def _show_json(names: list[str], rows: Iterator[list[Any]]) -> None:
    import msgspec

    encode = msgspec.json.Encoder(enc_hook=str).encode
    for row in rows:
        sys.stdout.write(encode(dict(zip(names, row, strict=True))).decode() + "\n")


def _show_csv(names: list[str], rows: Iterator[list[Any]]) -> None:
    import csv

    writer = csv.writer(sys.stdout)
    writer.writerow(names)
    writer.writerows(rows)


def _show_table(names: list[str], rows: Iterator[list[Any]]) -> None:
    from itertools import islice

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(*names)
    for row in islice(rows, SHOWN_ROWS_MAX):
        shown.add_row(*(Text("" if value is None else str(value)) for value in row))
    Console().print(shown)
    if next(rows, None) is not None:
        typer.echo(
            f"zombi: only the first {SHOWN_ROWS_MAX} rows are shown; --json and --csv give all",
            err=True,
        )
