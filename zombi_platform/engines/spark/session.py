"""The connection to a Spark Connect server: probed, shared, made anew when it is lost.

Processes that run the same code share one session of the server, whose Python workers then
stay warm from one flush to the next; a session of its own would cost each process 1.5
CPU-seconds and leave a daemon behind on the server. A dead server is noticed at once by
its port, not after the minutes that Spark's client would try for.
"""

from __future__ import annotations

import hashlib
import io
import socket
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pyspark.errors import PySparkException
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession

import zombi_platform
from zombi_platform.errors import EngineUnavailableError, SettingsError
from zombi_platform.settings import Settings

PORT_DEFAULT: Final = 15002
PROBE_SECS: Final = 2.0
CLIENT_TRIES: Final = 4
CLIENT_BACKOFF_MS_MAX: Final = 1000
SHOWN_ERROR_MAX: Final = 500
PACKAGE: Final = Path(zombi_platform.__file__).parent


class Connection:
    """One server; the session with it is made on first use and again after it was lost."""

    def __init__(self, remote: str, *, ship_code: bool) -> None:
        self.remote = remote
        self._host, self._port = _address(remote)
        self.ship_code = ship_code
        self._session: SparkSession | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Connection:
        if settings.spark_remote is not None:
            return cls(settings.spark_remote, ship_code=True)
        # The server of this machine runs this installation's Python, code and all.
        return cls(f"sc://127.0.0.1:{settings.spark_port}", ship_code=False)

    def probe(self) -> None:
        """Raise, within a moment, if nothing listens there."""
        try:
            socket.create_connection((self._host, self._port), PROBE_SECS).close()
        except OSError as error:
            raise EngineUnavailableError(
                f"no Spark Connect server answers at {self.remote}: {error}; start one with "
                "`zombi spark`, set ZOMBI_SPARK_REMOTE, or do without: ZOMBI_ENGINE=arrow"
            ) from error

    def session(self) -> SparkSession:
        """A session that the server knows."""
        self.probe()
        with spark_errors(self.remote):
            if self._session is not None and _is_alive(self._session):
                return self._session
            package = _package_zip()
            shared = self._open(uuid.UUID(bytes=hashlib.sha256(package).digest()[:16], version=4))
            # A server forgets sessions that were idle for long, and never lets their ids back.
            self._session = shared if _is_alive(shared) else self._open(uuid.uuid4())
            if self.ship_code:
                _ship(self._session, package)
            return self._session

    def close(self) -> None:
        """Leave the session to other processes and to the next flush."""
        if self._session is not None:
            self._session.client.close()
            self._session = None

    def _open(self, session_id: uuid.UUID) -> SparkSession:
        separator = ";" if "/;" in self.remote else "/;"
        url = f"{self.remote.rstrip('/')}{separator}session_id={session_id}"
        session = SparkSession.builder.remote(url).create()
        session.client.set_retry_policies(
            [DefaultPolicy(max_retries=CLIENT_TRIES, max_backoff=CLIENT_BACKOFF_MS_MAX)]
        )
        return session


@contextmanager
def spark_errors(remote: str) -> Iterator[None]:
    """What Spark's client raises, as an error of this platform."""
    try:
        yield
    except PySparkException as error:
        raise EngineUnavailableError(f"Spark at {remote} failed: {_gist(error)}") from error


def _gist(error: PySparkException) -> str:
    """The first line, or the last one where a task's traceback leads up to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    traceback = any(line.startswith("Traceback") for line in lines)
    return (lines[-1] if traceback else lines[0])[:SHOWN_ERROR_MAX]


def _is_alive(session: SparkSession) -> bool:
    try:
        # Any call tells; this one is answered without a job, in milliseconds.
        session.conf.get("spark.sql.session.timeZone")
    except PySparkException:
        return False
    return True


def _address(remote: str) -> tuple[str, int]:
    parts = urlsplit(remote)
    try:
        port = parts.port or PORT_DEFAULT
    except ValueError:
        port = 0
    if parts.scheme != "sc" or not parts.hostname or not port:
        raise SettingsError(f"ZOMBI_SPARK_REMOTE={remote!r}: must be sc://host:port")
    return parts.hostname, port


def _package_zip() -> bytes:
    """This package as Spark's executors can import it; equal bytes for equal code."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as package:
        for path in sorted(PACKAGE.rglob("*.py")):
            name = path.relative_to(PACKAGE.parent).as_posix()
            package.writestr(zipfile.ZipInfo(name), path.read_bytes())
    return content.getvalue()


def _ship(session: SparkSession, package: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "zombi_platform.zip"
        path.write_bytes(package)
        session.addArtifacts(str(path), pyfile=True)
