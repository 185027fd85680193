"""The tokens file and who its tokens stand for.

The file holds hashes only. It is replaced in one step under a lock, so that two commands
at once both keep their change and the gateway never reads half a file.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from zombi_platform.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    TerminalError,
    TransientError,
)
from zombi_platform.events import TABLE_NAME as TABLE

ROLES: Final = ("produce", "read", "pipeline", "admin")
TOKENS_FILE_NAME: Final = "tokens.json"
TOKENS_FILE_BYTES_MAX: Final = 16 * 1024 * 1024
NAME_LENGTH_MAX: Final = 128
SECRET_BYTES: Final = 32
LOCK_WAIT_SECS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request comes from. Whoever keeps one must drop it past `expires` (Unix seconds)."""

    name: str
    roles: frozenset[str]
    tables: frozenset[str] | None
    expires: float = math.inf

    def may(self, role: str, table: str | None = None) -> bool:
        """Whether the role is held for the table; without a table, for at least one.

        Only `admin` without a table means every table: such an act knows no bounds.
        """
        if role not in self.roles and "admin" not in self.roles:
            return False
        if self.tables is None:
            return True
        return role != "admin" if table is None else table in self.tables

    def require(self, role: str, table: str | None = None) -> None:
        """Raise unless `may`, and say what is missing beside what there is."""
        if not self.may(role, table):
            wanted = f"the {role} role" + (f" for table {table!r}" if table else "")
            raise ForbiddenError(f"token {self.name!r} lacks {wanted}: it has {self._scope()}")

    def _scope(self) -> str:
        roles = ", ".join(role for role in ROLES if role in self.roles) or "no role"
        if self.tables is None:
            return f"{roles} for every table"
        return f"{roles} for {_name_some(sorted(self.tables))}"


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file. Unknown fields are refused: a misspelt limit must not be none."""

    id: str
    name: str
    sha256: str
    roles: tuple[str, ...]
    tables: tuple[str, ...] | None
    created: str

    def principal(self, expires: float = math.inf) -> Principal:
        tables = None if self.tables is None else frozenset(self.tables)
        return Principal(self.name, frozenset(self.roles), tables, expires)


class TokensFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[Token, ...] = ()


def create_token(
    file: Path, name: str, roles: Sequence[str], tables: Sequence[str] | None = None
) -> str:
    """Add a token to the file, made if need be, and return it: it is not kept anywhere."""
    _check_new(name, roles, tables)
    with _locked(file):
        tokens = _read_or_empty(file).tokens
        if any(token.name == name for token in tokens):
            raise InvalidRequestError(
                f"there is a token named {name!r} already: choose another name or revoke it"
            )
        token_id, secret = _fresh_id(tokens), secrets.token_hex(SECRET_BYTES)
        token = Token(
            id=token_id,
            name=name,
            sha256=hash_secret(secret),
            roles=tuple(role for role in ROLES if role in roles),
            tables=tuple(sorted(set(tables))) if tables else None,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _write(file, TokensFile((*tokens, token)))
    return f"zombi_{token_id}_{secret}"


def list_tokens(file: Path) -> tuple[Token, ...]:
    """The tokens of the file in the order they were made; none if there is no file."""
    return _read_or_empty(file).tokens


def revoke_token(file: Path, id_or_name: str) -> Token:
    """Remove a token from the file and return what it was."""
    if not file.exists():
        raise NotFoundError(f"tokens file {file} does not exist: no token to revoke")
    with _locked(file):
        tokens = _read_or_empty(file).tokens
        hits = [token for token in tokens if id_or_name in (token.id, token.name)]
        if len(hits) != 1:
            problem = "no token has" if not hits else "more than one token has"
            raise NotFoundError(f"{problem} the id or name {id_or_name!r}: see `zombi token list`")
        _write(file, TokensFile(tuple(token for token in tokens if token is not hits[0])))
    return hits[0]


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _fresh_id(tokens: Sequence[Token]) -> str:
    taken = {token.id for token in tokens}
    while True:
        token_id = base64.b32encode(secrets.token_bytes(5)).decode("ascii").lower()
        if token_id not in taken:
            return token_id


def _check_new(name: str, roles: Sequence[str], tables: Sequence[str] | None) -> None:
    if not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable() or name != name.strip():
        raise InvalidRequestError(
            f"token name {name[:140]!r} must be 1 to {NAME_LENGTH_MAX} printable characters"
        )
    if not roles:
        raise InvalidRequestError(f"a token needs a role: {', '.join(ROLES)}")
    problem = _scope_problem(roles, tables)
    if problem:
        raise InvalidRequestError(problem)


def _scope_problem(roles: Sequence[str], tables: Sequence[str] | None) -> str | None:
    for role in roles:
        if role not in ROLES:
            return f"unknown role {role!r}: it must be one of {', '.join(ROLES)}"
    for table in tables or ():
        if TABLE.fullmatch(table) is None:
            return f"invalid table name {table[:140]!r}: it must match {TABLE.pattern}"
    return None


def parse_tokens(data: bytes) -> TokensFile:
    if len(data) > TOKENS_FILE_BYTES_MAX:
        raise TerminalError(f"it is larger than {TOKENS_FILE_BYTES_MAX} bytes")
    try:
        content = msgspec.json.decode(data, type=TokensFile)
    except msgspec.DecodeError as error:
        raise TerminalError(f"it is not a tokens file: {error}") from error
    if len({token.id for token in content.tokens}) != len(content.tokens):
        raise TerminalError("two of its tokens have the same id")
    for token in content.tokens:
        problem = _scope_problem(token.roles, token.tables)
        if problem is None and re.fullmatch(r"[0-9a-f]{64}", token.sha256) is None:
            problem = "its sha256 is not 64 lower-case hexadecimal digits"
        if problem:
            raise TerminalError(f"token {token.id[:16]!r}: {problem}")
    return content


def _read_or_empty(file: Path) -> TokensFile:
    try:
        return parse_tokens(file.read_bytes())
    except FileNotFoundError:
        return TokensFile()
    except TerminalError as error:
        raise TerminalError(f"tokens file {file} cannot be used: {error}") from error
    except OSError as error:
        raise TerminalError(f"cannot read tokens file {file}: {error.strerror}") from error


def _write(file: Path, content: TokensFile) -> None:
    """Replace the file in one step, keeping owner and mode so that the gateway still reads it."""
    target = file.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open_private(temporary) as descriptor:
            if target.exists():
                status = target.stat()
                os.fchown(descriptor, status.st_uid, status.st_gid)
                os.fchmod(descriptor, status.st_mode & 0o777)
            write_durably(descriptor, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        os.replace(temporary, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise TerminalError(f"cannot write tokens file {file}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def open_private(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_durably(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock that makes reading, changing and replacing the file one step."""
    target = file.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise TerminalError(f"cannot write beside tokens file {file}: {error.strerror}") from error
    try:
        _wait_for_lock(lock, file)
        yield
    finally:
        os.close(lock)


def _wait_for_lock(lock: int, file: Path) -> None:
    deadline = time.monotonic() + LOCK_WAIT_SECS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TransientError(
                    f"another `zombi token` has held tokens file {file} for "
                    f"{LOCK_WAIT_SECS:g} s: try again when it is done"
                ) from error
        time.sleep(0.02)


def _name_some(tables: Sequence[str]) -> str:
    shown = ", ".join(tables[:5])
    more = f" and {len(tables) - 5} more" if len(tables) > 5 else ""
    return f"table{'s' if len(tables) != 1 else ''} {shown}{more}"
