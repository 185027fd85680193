"""What `zombi up` runs: programs, where they listen, what they wait for. No process is started
here.

Everything listens on loopback but the gateway, which listens where ZOMBI_HOST says. The
Dagster processes share DAGSTER_HOME in the data directory; its dagster.yaml is a copy of the
one in this package and is renewed at every start.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zombi_platform.engines import choose_engine
from zombi_platform.errors import SettingsError
from zombi_platform.settings import Settings
from zombi_platform.supervisor import probes

LOOPBACK: Final = "127.0.0.1"
LOCATION: Final = "zombi"
"""Dagster keeps the state of sensors under this name; workspace.yaml says the same."""

SPARK_READY_SECS: Final = 600.0
"""The first start downloads Spark's packages."""

SPARK_STOP_SECS: Final = 25.0

_SOCKET_PATH_MAX: Final = 100
"""The kernel takes no longer address of a Unix socket (sun_path)."""


@dataclass(frozen=True)
class Service:
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    probe: probes.Probe
    address: str
    purpose: str
    after: tuple[str, ...] = ()
    """Names of the services that must answer before this one starts."""
    stop_secs: float = 10.0
    ready_secs: float = 120.0


@dataclass(frozen=True)
class Plan:
    services: tuple[Service, ...]
    home: Path
    remark: str = ""


def make_plan(settings: Settings, environ: Mapping[str, str], *, dagster: bool) -> Plan:
    """The services for these settings, in the order in which they start."""
    home = settings.data_dir.resolve()
    engine, reason = choose_engine(settings)
    shared = _environment(settings, environ, home) | {"ZOMBI_ENGINE": engine}
    services = [_gateway(settings, shared)]
    if needs_spark_server(settings):
        services.append(_spark(settings, shared))
    if dagster and settings.tokens_file is not None and settings.token is None:
        raise SettingsError(
            "ZOMBI_TOKENS_FILE is set, so the pipeline needs a token too: `zombi token create "
            "pipeline --role pipeline`, then set ZOMBI_TOKEN"
        )
    if dagster:
        services += _dagster(settings, shared, home / "dagster")
    return Plan(tuple(services), home, f"the {engine} engine writes Parquet: {reason}")


def needs_spark_server(settings: Settings) -> bool:
    return choose_engine(settings)[0] == "spark" and settings.spark_remote is None


def _environment(settings: Settings, environ: Mapping[str, str], home: Path) -> dict[str, str]:
    ours = {
        "ZOMBI_DATA_DIR": str(home),
        "ZOMBI_PORT": str(settings.port),
        "ZOMBI_DAGSTER_PORT": str(settings.dagster_port),
        "ZOMBI_SPARK_PORT": str(settings.spark_port),
        "ZOMBI_URL": f"http://{_reach(settings.host)}:{settings.port}",
        "PYTHONUNBUFFERED": "1",
    }
    given = {"ZOMBI_URL": environ["ZOMBI_URL"]} if environ.get("ZOMBI_URL") else {}
    return {**environ, **ours, **given}


def _reach(host: str) -> str:
    """The address under which this machine reaches a listener on `host`."""
    if host in ("0.0.0.0", "::", ""):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host


def _gateway(settings: Settings, environ: Mapping[str, str]) -> Service:
    host = _reach(settings.host)
    return Service(
        name="gateway",
        command=(_program("zombi"), "gateway"),
        environ=environ,
        probe=probes.http(host.strip("[]"), settings.port, "/health/live"),
        address=f"http://{host}:{settings.port}",
        purpose="takes events; API at /docs",
        stop_secs=settings.shutdown_grace_secs + 5.0,
    )


def _spark(settings: Settings, environ: Mapping[str, str]) -> Service:
    return Service(
        name="spark",
        command=(_program("zombi"), "spark"),
        environ=environ,
        probe=probes.tcp(LOOPBACK, settings.spark_port),
        address=f"sc://{LOOPBACK}:{settings.spark_port}",
        purpose="writes Parquet",
        stop_secs=SPARK_STOP_SECS,
        ready_secs=SPARK_READY_SECS,
    )


def _dagster(settings: Settings, environ: Mapping[str, str], home: Path) -> list[Service]:
    socket = _socket(home)
    workspace = home / "workspace.yaml"
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("dagster.yaml"), home / "dagster.yaml")
    workspace.write_text(
        f"load_from:\n  - grpc_server: {{socket: {str(socket)!r}, location_name: {LOCATION}}}\n"
    )
    environ = {**environ, "DAGSTER_HOME": str(home)}
    port = settings.dagster_port
    code = Service(
        name="code",
        command=(
            *(_program("dagster"), "api", "grpc", "--socket", str(socket)),
            *("--module-name", "zombi_platform.definitions", "--location-name", LOCATION),
            *("--log-level", "warning"),
        ),
        environ=environ,
        probe=probes.unix(socket),
        address=f"unix:{socket}",
        purpose="Dagster's assets, sensors and runs",
        after=("gateway",),
    )
    web = Service(
        name="web",
        command=(
            *(_program("dagster-webserver"), "--host", LOOPBACK, "--port", str(port)),
            *("--workspace", str(workspace)),
        ),
        environ=environ,
        probe=probes.http(LOOPBACK, port, "/server_info"),
        address=f"http://{LOOPBACK}:{port}",
        purpose="Dagster's UI",
        after=("code",),
    )
    daemon = Service(
        name="daemon",
        command=(
            *(_program("dagster-daemon"), "run", "--workspace", str(workspace)),
            # Its every tick would be a line; the UI shows them better.
            *("--log-level", "warning"),
        ),
        environ=environ,
        probe=probes.dagster_daemon(LOOPBACK, port),
        address="-",
        purpose="Dagster's sensors, schedules and run queue",
        after=("web", "spark"),
    )
    return [code, web, daemon]


def _socket(home: Path) -> Path:
    socket = home / "code.sock"
    if len(str(socket)) <= _SOCKET_PATH_MAX:
        return socket
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"zombi-{digest}.sock"


def _program(name: str) -> str:
    """A program of this virtual environment, whatever PATH says."""
    return str(Path(sys.executable).with_name(name))
