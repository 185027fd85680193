"""DuckDB with Iceberg, on this platform's catalog or on a metadata file.

The extensions come with the lock as Python packages and are loaded by path, because DuckDB
itself would fetch them from the internet. Versions of both go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Final
from urllib.parse import urlsplit

import duckdb

from zombi_platform.errors import TerminalError
from zombi_platform.lake.storage import Storage

EXTENSIONS: Final = ("httpfs", "avro", "iceberg")


@contextmanager
def iceberg_duckdb() -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB in memory that reads Iceberg."""
    with duckdb.connect(config={"allow_unsigned_extensions": "true"}) as connection:
        for name in EXTENSIONS:
            connection.execute(f"LOAD {quoted(_extension(name))}")
        yield connection


def attach(
    connection: duckdb.DuckDBPyConnection,
    url: str,
    warehouse: str,
    token: str | None = None,
    name: str | None = None,
) -> None:
    """Make a warehouse of the gateway at this URL a database of its name."""
    options = f"TYPE iceberg, ENDPOINT {quoted(url)}, "
    if token is None:
        options += "AUTHORIZATION_TYPE 'none'"
    else:
        options += f"TOKEN {quoted(token)}"
    connection.execute(f"ATTACH {quoted(warehouse)} AS {name or warehouse} ({options})")


def use_storage(connection: duckdb.DuckDBPyConnection, storage: Storage) -> None:
    """Let DuckDB read the lake's files with the credentials of this process."""
    if not storage.is_s3:
        return
    import boto3

    credentials = boto3.session.Session().get_credentials()
    options = {"REGION": storage.region}
    if credentials is not None:
        frozen = credentials.get_frozen_credentials()
        options |= {"KEY_ID": frozen.access_key or "", "SECRET": frozen.secret_key or ""}
        options |= {"SESSION_TOKEN": frozen.token} if frozen.token else {}
    if storage.endpoint is not None:
        parts = urlsplit(storage.endpoint)
        options |= {"ENDPOINT": parts.netloc, "URL_STYLE": "path"}
        options |= {"USE_SSL": "true" if parts.scheme == "https" else "false"}
    given = ", ".join(f"{name} {quoted(value)}" for name, value in options.items())
    connection.execute(f"CREATE SECRET zombi_storage (TYPE s3, {given})")


def quoted(text: str) -> str:
    """The text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _extension(name: str) -> str:
    place = resources.files(f"duckdb_extension_{name}")
    path = place / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
    if not path.is_file():
        raise TerminalError(
            f"DuckDB {duckdb.__version__} finds no {name} extension of its version: install "
            f"duckdb-extension-{name}=={duckdb.__version__}"
        )
    return str(path)
