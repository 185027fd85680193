"""The locks install the same bytes everywhere: pinned, hashed, and bound to no package host."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = ["bootstrap.lock", "requirements.lock", "requirements-dev.lock"]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(lock: str) -> dict[str, str]:
    """The lock's text by package name: the pin, its marker and its hashes on one line."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line for line in lines}


def pinned(entry: str) -> str:
    return entry.split("==")[1].split()[0]


def declared(group: str | None) -> list[Requirement]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if group is None:
        return [Requirement(item) for item in project["project"]["dependencies"]]
    found: list[Requirement] = []
    for item in project["dependency-groups"][group]:
        nested = isinstance(item, dict)
        found += declared(item["include-group"]) if nested else [Requirement(item)]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_host_and_no_path_of_a_machine(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert not re.findall(r"\w+://\S*|--(?:extra-)?index-url.*|--find-links.*|(?<!\w)/\w+\S*", text)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_requirement_is_pinned_and_hashed(lock: str) -> None:
    found = entries(lock)
    assert found
    loose = [e for e in found.values() if not re.match(r"[\w.-]+==\S+ ", e) or not HASH.search(e)]
    assert loose == []


@pytest.mark.parametrize(
    ("lock", "group"),
    [
        ("bootstrap.lock", "bootstrap"),
        ("requirements.lock", None),
        ("requirements-dev.lock", None),
        ("requirements-dev.lock", "dev"),
    ],
)
def test_lock_satisfies_what_pyproject_declares(lock: str, group: str | None) -> None:
    found = entries(lock)
    unmet = [
        str(requirement)
        for requirement in declared(group)
        if (entry := found.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(pinned(entry), prereleases=True)
    ]
    assert unmet == [], "run `make lock`"


@pytest.mark.parametrize("lock", ["bootstrap.lock", "requirements.lock"])
def test_smaller_locks_agree_with_the_development_lock(lock: str) -> None:
    everything = {name: pinned(entry) for name, entry in entries("requirements-dev.lock").items()}
    assert {
        name: pinned(entry) for name, entry in entries(lock).items()
    }.items() <= everything.items()
