"""Who may do what: bearer tokens, their file, and OAuth2 access tokens made from them.

The file holds hashes only, and a file that cannot be read keeps the tokens of before or
gives nobody access: no state of it opens the door. OAuth2 access tokens are stateless;
they end with their lifetime or with the token they were granted for. Nothing here knows
HTTP beyond the `Authorization` value, and nothing decides which route needs which role.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from zombi_platform.errors import (
    StartupError,
    TerminalError,
    UnauthorizedError,
)
from zombi_platform.gateway.tokens import (
    SECRET_BYTES,
    TOKENS_FILE_BYTES_MAX,
    Principal,
    Token,
    TokensFile,
    hash_secret,
    open_private,
    parse_tokens,
    write_durably,
)
from zombi_platform.settings import Settings

SIGNING_KEY_NAME: Final = "oauth.key"
CREDENTIAL_BYTES_MAX: Final = 512
SETTLED_AFTER_NS: Final = 2_000_000_000

OAUTH_PREFIX: Final = "zombi_oauth_"
TOKEN: Final = re.compile(r"zombi_([a-z2-7]{8})_([0-9a-f]{64})", re.ASCII)
OAUTH_TOKEN: Final = re.compile(
    OAUTH_PREFIX + r"([a-z2-7]{8})\.([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII
)

ANONYMOUS: Final = Principal("anonymous", frozenset({"admin"}), None)


class Access:
    """Authenticates requests against the tokens file, which `refresh` follows.

    Give `signing_key` the bytes of `signing_key(data_dir)` to let OAuth2 access tokens
    outlive a restart; without it they end with the process.
    """

    def __init__(
        self,
        tokens_file: Path | None,
        oauth_token_secs: int,
        *,
        signing_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.enabled = tokens_file is not None
        self.generation = 0
        self.problem: str | None = None
        self._file = tokens_file
        self._oauth_token_secs = oauth_token_secs
        self._signing_key = signing_key or secrets.token_bytes(SECRET_BYTES)
        self._clock = clock
        self._signature: tuple[int, int, int] | None = None
        self._known: Mapping[str, tuple[Token, Principal]] = MappingProxyType({})
        if tokens_file is not None:
            self._load_first(tokens_file)

    def refresh(self) -> str | None:
        """Reread the file if it changed; return a problem to log when there is a new one.

        A broken file keeps the tokens of before; a deleted one means that none is valid.
        """
        before = self.problem
        self.problem = self._follow() if self._file is not None else None
        return self.problem if self.problem != before else None

    def authenticate(self, header: bytes | None) -> Principal:
        """The principal of an `Authorization` value, or UnauthorizedError."""
        if not self.enabled:
            return ANONYMOUS
        credential = _bearer(header)
        if credential.startswith(OAUTH_PREFIX):
            return self._authenticate_oauth(credential)
        match = TOKEN.fullmatch(credential)
        if match is None:
            raise UnauthorizedError(
                "malformed token: it must be one that `zombi token create` printed"
            )
        return self._verify(match[1], match[2])[1]

    def grant(self, client_id: str, client_secret: str) -> tuple[str, int]:
        """OAuth2 client credentials: an access token and its lifetime in seconds.

        The secret is the whole token or its last part; with the whole token the id may be
        empty, as clients that are given one string send it.
        """
        lifetime = self._oauth_token_secs
        if not self.enabled:
            return f"{OAUTH_PREFIX}anonymous", lifetime
        match = TOKEN.fullmatch(client_secret)
        if match is not None and client_id in ("", match[1]):
            client_id, client_secret = match[1], match[2]
        token, _ = self._verify(client_id, client_secret)
        expiry = int(self._clock()) + lifetime
        return f"{OAUTH_PREFIX}{token.id}.{expiry}.{self._sign(token, expiry)}", lifetime

    def _authenticate_oauth(self, credential: str) -> Principal:
        match = OAUTH_TOKEN.fullmatch(credential)
        if match is None:
            raise UnauthorizedError("malformed access token: ask /v1/oauth/tokens for one")
        found, expiry = self._known.get(match[1]), int(match[2])
        if found is None or not hmac.compare_digest(self._sign(found[0], expiry), match[3]):
            raise UnauthorizedError(
                "unknown access token: it was made for a token that is revoked, or elsewhere"
            )
        if expiry <= self._clock():
            raise UnauthorizedError("expired access token: ask /v1/oauth/tokens for a new one")
        return found[0].principal(float(expiry))

    def _verify(self, token_id: str, secret: str) -> tuple[Token, Principal]:
        found = self._known.get(token_id)
        if found is None or not hmac.compare_digest(found[0].sha256, hash_secret(secret)):
            raise UnauthorizedError("unknown token: it is mistyped, revoked or of another gateway")
        return found

    def _sign(self, token: Token, expiry: int) -> str:
        # The stored hash makes it end with its token; the signing key makes a reader of
        # the tokens file unable to forge it.
        message = f"{token.id}.{expiry}.{token.sha256}".encode()
        return hmac.new(self._signing_key, message, hashlib.sha256).hexdigest()

    def _load_first(self, file: Path) -> None:
        try:
            self._adopt(*_read_with_signature(file))
        except FileNotFoundError as error:
            raise StartupError(
                f"tokens file {file} does not exist: make it with `zombi token create`, "
                "or unset ZOMBI_TOKENS_FILE"
            ) from error
        except (OSError, TerminalError) as error:
            raise StartupError(f"cannot read tokens file {file}: {error}") from error

    def _follow(self) -> str | None:
        assert self._file is not None
        try:
            if _signature(os.stat(self._file)) != self._signature:
                self._adopt(*_read_with_signature(self._file))
                return None
        except FileNotFoundError:
            self._signature = None
            self._replace({})
            return f"tokens file {self._file} is gone: no token is valid until it is back"
        except (OSError, TerminalError) as error:
            return f"tokens file {self._file} cannot be used, its old tokens stay: {error}"
        return self.problem

    def _adopt(self, content: TokensFile, signature: tuple[int, int, int] | None) -> None:
        self._signature = signature
        self._replace({token.id: (token, token.principal()) for token in content.tokens})

    def _replace(self, known: dict[str, tuple[Token, Principal]]) -> None:
        if known != self._known:
            self._known = MappingProxyType(known)
            self.generation += 1


def check_bind(host: str, settings: Settings) -> None:
    """Refuse an address that others can reach while nobody has to show a token."""
    if settings.tokens_file is not None or settings.allow_anonymous or _is_loopback(host):
        return
    raise StartupError(
        f"ZOMBI_HOST={host} can be reached from other machines and no tokens are configured: "
        "make one with `zombi token create` and set ZOMBI_TOKENS_FILE, listen on 127.0.0.1, "
        "or set ZOMBI_ALLOW_ANONYMOUS=true to let everyone do everything"
    )


def signing_key(data_dir: Path) -> bytes:
    """The data directory's key for OAuth2 access tokens, made at the first call."""
    path = data_dir / SIGNING_KEY_NAME
    with contextlib.suppress(FileExistsError):
        _create_key(path)
    key = path.read_bytes()
    if len(key) != SECRET_BYTES:
        raise StartupError(f"{path} is not {SECRET_BYTES} bytes long: delete it to get a new one")
    return key


def _create_key(path: Path) -> None:
    # Linked into place when whole, so that no other process ever reads half a key.
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open_private(temporary) as descriptor:
            write_durably(descriptor, secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _bearer(header: bytes | None) -> str:
    if not header:
        raise UnauthorizedError(
            "this gateway needs a token: send the header `Authorization: Bearer zombi_…`"
        )
    scheme, _, credential = header.partition(b" ")
    if scheme.lower() != b"bearer":
        raise UnauthorizedError("the Authorization header must be `Bearer` and a token")
    credential = credential.strip()
    if not credential.isascii() or len(credential) > CREDENTIAL_BYTES_MAX:
        raise UnauthorizedError("malformed token: it must be one that `zombi token create` printed")
    return credential.decode("ascii")


def _is_loopback(host: str) -> bool:
    try:
        return _is_loopback_address(host)
    except ValueError:
        pass
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"ZOMBI_HOST={host} cannot be resolved: {error}") from error
    return all(_is_loopback_address(str(entry[4][0])) for entry in found)


def _is_loopback_address(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_with_signature(file: Path) -> tuple[TokensFile, tuple[int, int, int] | None]:
    """The content and what to compare `stat` with, none while the file is this young.

    Two changes within one tick of the file system's clock look alike from outside.
    """
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        data = stream.read(TOKENS_FILE_BYTES_MAX + 1)
    settled = time.time_ns() - status.st_mtime_ns > SETTLED_AFTER_NS
    return parse_tokens(data), _signature(status) if settled else None
