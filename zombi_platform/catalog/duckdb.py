"""DuckDB with Iceberg, on a metadata file or on this platform's catalog.

The extensions come with the lock as Python packages and are loaded by path, because DuckDB
itself would fetch them from the internet. Versions of both go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Final
from urllib.parse import urlsplit

import duckdb

from zombi_platform.catalog.place import Place
from zombi_platform.errors import TerminalError

EXTENSIONS: Final = ("httpfs", "avro", "iceberg")


@contextmanager
def iceberg_duckdb() -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB in memory that reads Iceberg."""
    with duckdb.connect(
        config={"allow_unsigned_extensions": True, "autoinstall_known_extensions": False}
    ) as connection:
        for name in EXTENSIONS:
            connection.execute(f"LOAD {quoted(extension(name))}")
        yield connection


def attach(
    connection: duckdb.DuckDBPyConnection, url: str, warehouse: str, token: str | None = None
) -> None:
    """Make a warehouse of the gateway at this URL a database of the same name."""
    sign_in = "AUTHORIZATION_TYPE 'none'" if token is None else f"TOKEN {quoted(token)}"
    connection.execute(
        f"ATTACH {quoted(warehouse)} AS {warehouse} "
        f"(TYPE iceberg, ENDPOINT {quoted(url)}, {sign_in})"
    )


def use_tables(connection: duckdb.DuckDBPyConnection, place: Place, token: str | None) -> None:
    """Attach the place so that its tables go by their bare names."""
    if place.storage:
        use_bucket(connection, place.storage)
    attach(connection, place.url, place.warehouse, token)
    connection.execute(f'USE {place.warehouse}."{place.namespace}"')


def use_bucket(connection: duckdb.DuckDBPyConnection, storage: Mapping[str, str]) -> None:
    """Let DuckDB read the lake's bucket with the AWS credentials of this process."""
    import boto3

    options = {"REGION": storage["s3.region"]}
    credentials = boto3.session.Session().get_credentials()
    if credentials is not None:
        frozen = credentials.get_frozen_credentials()
        options |= {"KEY_ID": frozen.access_key or "", "SECRET": frozen.secret_key or ""}
        options |= {"SESSION_TOKEN": frozen.token} if frozen.token else {}
    if "s3.endpoint" in storage:
        parts = urlsplit(storage["s3.endpoint"])
        ssl = "true" if parts.scheme == "https" else "false"
        options |= {"ENDPOINT": parts.netloc, "URL_STYLE": "path", "USE_SSL": ssl}
    given = ", ".join(f"{name} {quoted(value)}" for name, value in options.items())
    connection.execute(f"CREATE SECRET zombi_bucket (TYPE s3, {given})")


def extension(name: str) -> str:
    """The file of an extension that the lock installs."""
    place = resources.files(f"duckdb_extension_{name}")
    path = place / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
    if not path.is_file():
        raise TerminalError(
            f"DuckDB {duckdb.__version__} finds no {name} extension of its version: install "
            f"duckdb-extension-{name}=={duckdb.__version__}"
        )
    return str(path)


def quoted(text: str) -> str:
    """The text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"
