"""A real REST catalog for integration tests: Iceberg's own, with its tables on this disk."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVER = Path(__file__).parent / "rest_server"


@dataclass(frozen=True)
class RestServer:
    url: str
    directory: Path


@pytest.fixture(scope="session")
def rest_classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Maven fetches the jars once, into its own cache."""
    target = tmp_path_factory.mktemp("maven") / "classpath"
    subprocess.run(
        [
            *("mvn", "-q", "-B", "-f", str(SERVER / "pom.xml")),
            *("dependency:build-classpath", f"-Dmdep.outputFile={target}"),
        ],
        check=True,
        timeout=600,
    )
    return target.read_text()


@pytest.fixture(scope="session")
def rest_server(
    rest_classpath: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RestServer]:
    with running_rest_server(rest_classpath, tmp_path_factory.mktemp("rest")) as server:
        yield server


@contextmanager
def running_rest_server(classpath: str, directory: Path) -> Iterator[RestServer]:
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"
    process = subprocess.Popen(
        [
            *("java", "-Xmx256m", quiet, "-cp", classpath),
            *(str(SERVER / "RestServer.java"), str(directory)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"port (\d+)", line)
        assert found is not None, f"the REST catalog did not start: {line!r}"
        yield RestServer(f"http://127.0.0.1:{found[1]}", directory)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
