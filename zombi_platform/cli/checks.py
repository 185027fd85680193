"""What `zombi doctor` looks at, one function for each thing.

A check returns its finding and never raises; what it probes it leaves as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from zombi_platform.client import GatewayClient
from zombi_platform.client.calls import Readiness
from zombi_platform.errors import (
    ForbiddenError,
    GatewayUnreachableError,
    SettingsError,
    StartupError,
    TerminalError,
    UnauthorizedError,
    ZombiError,
)
from zombi_platform.gateway.access import check_bind
from zombi_platform.gateway.tokens import list_tokens
from zombi_platform.hot.store import DIRECTORY
from zombi_platform.settings import Settings, remarks

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

PYTHON_MIN: Final = (3, 11)
JAVA_MIN: Final = 17
DISK_BYTES_MIN: Final = 2**30
FILES_BESIDE_CONNECTIONS: Final = 1024
PROBE_SECS: Final = 5.0
JAVA_SECS_MAX: Final = 20.0


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: str
    found: str
    todo: str = ""


def run_checks(environ: Mapping[str, str]) -> list[Check]:
    """All findings, in the order in which things are needed."""
    try:
        settings = Settings.from_env(environ)
    except SettingsError as error:
        broken = Check("settings", FAIL, str(error), "correct them; see docs/configuration.md")
        return [check_python(), broken]
    gateway = probe_gateway(settings)
    findings = [
        check_python(),
        check_java(environ, needed=settings.engine == "spark"),
        check_settings(environ),
        check_data_directory(settings.data_dir),
        check_lock(settings, gateway),
        check_disk(settings),
        check_file_limit(settings),
        check_tokens(settings),
        check_port(settings, gateway),
        check_gateway(settings, gateway),
    ]
    if settings.s3_bucket is not None:
        findings.append(check_object_store(settings, settings.s3_bucket))
    return findings


def check_python() -> Check:
    version = platform.python_version()
    if sys.version_info < PYTHON_MIN:
        return Check("Python", FAIL, version, f"install {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer")
    return Check("Python", OK, version)


def check_java(environ: Mapping[str, str], *, needed: bool) -> Check:
    """Spark needs it; the Arrow engine does not."""
    status = FAIL if needed else WARN
    todo = f"install Java {JAVA_MIN} or newer for Spark" + (
        ", or set ZOMBI_ENGINE=arrow" if needed else "; without it the Arrow engine works"
    )
    home = environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java", path=environ.get("PATH"))
    if java is None:
        return Check("Java", status, "not found", todo)
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_SECS_MAX
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("Java", status, f"{java} does not run: {error}", todo)
    version = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', done.stderr)
    if version is None:
        return Check("Java", status, f"{java} does not tell its version", todo)
    if int(version[2]) < JAVA_MIN:
        return Check("Java", status, f"{version[1]} in {java} is too old", todo)
    return Check("Java", OK, f"{version[1]} in {java}")


def check_settings(environ: Mapping[str, str]) -> Check:
    found = remarks(environ)
    if found:
        return Check("settings", WARN, "; ".join(found), "correct or unset them")
    return Check("settings", OK, "every ZOMBI_ variable that is set is known and can work")


def check_data_directory(directory: Path) -> Check:
    name, todo = "data directory", "set ZOMBI_DATA_DIR to a directory this user can write"
    directory = directory.absolute()
    existing = _nearest_existing(directory)
    try:
        # Where no file can be made nothing is left behind; where one can, neither.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = f"{directory} cannot be written: {error.strerror or error}"
        return Check(name, FAIL, reason, todo)
    if existing != directory:
        return Check(name, OK, f"{directory} is not there yet and can be made")
    return Check(name, OK, f"{directory} can be written")


def check_lock(settings: Settings, gateway: Readiness | ZombiError) -> Check:
    """A database has one owner: the gateway, if it is the one that answers."""
    lock = settings.data_dir / DIRECTORY / "LOCK"
    try:
        with lock.open("rb") as stream:
            fcntl.lockf(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return Check("hot buffer", OK, "there is none yet; the gateway makes it")
    except BlockingIOError:
        if isinstance(gateway, Readiness):
            return Check("hot buffer", OK, f"{lock.parent} is in use, and a gateway answers")
        return Check(
            "hot buffer",
            WARN,
            f"{lock.parent} is in use by a process, but no gateway answers at {settings.url}",
            "stop that process, or set ZOMBI_URL to where its gateway listens",
        )
    except OSError as error:
        reason = f"{lock} cannot be read: {error.strerror or error}"
        return Check("hot buffer", FAIL, reason, "run the gateway and this as the same user")
    return Check("hot buffer", OK, f"{lock.parent} is not in use")


def check_disk(settings: Settings) -> Check:
    place = _nearest_existing(settings.data_dir)
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free at {place}"
    if free < DISK_BYTES_MIN:
        return Check("disk", FAIL, found, "free some space or move ZOMBI_DATA_DIR")
    if free < settings.max_hot_bytes_mb * 2**20:
        todo = "free some space or lower it: writes fail when the disk is full"
        bound = f"the hot buffer may grow to {settings.max_hot_bytes_mb / 1024:.1f} GiB"
        return Check("disk", WARN, f"{found}, {bound} (ZOMBI_MAX_HOT_BYTES_MB)", todo)
    return Check("disk", OK, found)


def check_file_limit(settings: Settings) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = settings.max_connections + FILES_BESIDE_CONNECTIONS
    if limit != resource.RLIM_INFINITY and limit < needed:
        todo = "raise it (ulimit -Hn, LimitNOFILE=) or lower ZOMBI_MAX_CONNECTIONS"
        found = f"{limit}, but {settings.max_connections} connections may need {needed}"
        return Check("open files", WARN, found, todo)
    return Check("open files", OK, "no limit" if limit == resource.RLIM_INFINITY else str(limit))


def check_tokens(settings: Settings) -> Check:
    file = settings.tokens_file
    if file is None:
        return _check_anonymous(settings)
    make = f"make one: zombi token create NAME --role produce --file {file}"
    if not file.exists():
        return Check("tokens", FAIL, f"{file} does not exist; the gateway will not start", make)
    try:
        tokens = list_tokens(file)
    except TerminalError as error:
        return Check("tokens", FAIL, str(error), "restore the file, or delete it and " + make)
    if not tokens:
        return Check("tokens", WARN, f"{file} holds no token: nobody has access", make)
    if file.stat().st_mode & 0o022:
        found = f"{file} can be changed by other users"
        return Check("tokens", WARN, found, f"chmod go-w {file}")
    return Check("tokens", OK, f"{len(tokens)} in {file}")


def _check_anonymous(settings: Settings) -> Check:
    try:
        check_bind(settings.host, settings)
    except StartupError as error:
        return Check("tokens", FAIL, str(error), "zombi token create NAME --role admin")
    if settings.allow_anonymous:
        found = "everyone who reaches the port may do all (ZOMBI_ALLOW_ANONYMOUS)"
        return Check("tokens", WARN, found, "make tokens and set ZOMBI_TOKENS_FILE")
    return Check("tokens", OK, "none are needed: only this machine is served")


def probe_gateway(settings: Settings) -> Readiness | ZombiError:
    """What answers at ZOMBI_URL, and whether it takes the token there is."""
    try:
        with GatewayClient(settings.url, settings.token, timeout_secs=PROBE_SECS) as client:
            readiness = client.health()
            with contextlib.suppress(ForbiddenError):  # known, though not for reading
                client.stats()
            return readiness
    except ZombiError as error:
        return error


def check_port(settings: Settings, gateway: Readiness | ZombiError) -> Check:
    name, where = "port", f"{settings.host}:{settings.port}"
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
    except OSError as error:
        ours = not isinstance(gateway, GatewayUnreachableError)
        if ours and urlsplit(settings.url).port == settings.port:
            return Check(name, OK, f"{where} is in use by what answers at {settings.url}")
        found = f"cannot listen on {where}: {error.strerror or error}"
        return Check(name, FAIL, found, "stop what uses it, or set ZOMBI_PORT or ZOMBI_HOST")
    return Check(name, OK, f"{where} is free")


def check_gateway(settings: Settings, gateway: Readiness | ZombiError) -> Check:
    name = "gateway"
    match gateway:
        case Readiness(ready=True):
            return Check(name, OK, f"answers at {settings.url} and takes writes")
        case Readiness(hot_storage=hot):
            found = f"{settings.url} takes no writes: {hot.get('error', gateway.status)}"
            return Check(name, FAIL, found, "see its log; free disk space is the usual cure")
        case GatewayUnreachableError():
            todo = "start one with `zombi gateway`, or set ZOMBI_URL to where it is"
            return Check(name, WARN, f"nothing answers at {settings.url}", todo)
        case UnauthorizedError():
            return Check(name, WARN, str(gateway), "set ZOMBI_TOKEN for the command line")
    return Check(name, FAIL, str(gateway), "set ZOMBI_URL to the address of a gateway")


def check_object_store(settings: Settings, bucket: str) -> Check:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    where = f"s3://{bucket} at {settings.s3_endpoint or 'AWS'}"
    config = Config(
        connect_timeout=PROBE_SECS, read_timeout=PROBE_SECS, retries={"total_max_attempts": 1}
    )
    try:
        boto3.client(
            "s3",
            endpoint_url=settings.s3_endpoint,
            region_name=settings.s3_region,
            config=config,
        ).head_bucket(Bucket=bucket)
    except NoCredentialsError:
        todo = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or give the machine a role"
        return Check("object store", FAIL, f"{where}: there are no credentials", todo)
    except ClientError as error:
        cures = {"404": "create the bucket", "403": "let these credentials use the bucket"}
        todo = cures.get(error.response["Error"]["Code"], "ask whoever runs the object store")
        return Check("object store", FAIL, f"{where}: {error}", todo)
    except (BotoCoreError, ValueError) as error:
        todo = "check ZOMBI_S3_ENDPOINT, ZOMBI_S3_REGION and the network"
        return Check("object store", FAIL, f"{where}: {error}", todo)
    return Check("object store", OK, f"{where} answers")


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
