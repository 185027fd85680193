"""What the gateway and the staging process say to each other, one line of JSON each.

A `Stage` is followed by an Arrow stream of its rows; a `Published` by the metadata file it
tells of.
"""

from __future__ import annotations

from typing import Final

import msgspec

from zombi_platform.cuts import Range
from zombi_platform.errors import TransientError, ZombiError
from zombi_platform.lake.storage import Storage


class Hello(msgspec.Struct, tag=True):
    """The first word: where the lake is."""

    storage: Storage


class Stage(msgspec.Struct, tag=True):
    """Write the rows that follow, which must be these ranges, as a block."""

    table: str
    location: str
    ranges: tuple[Range, ...]


class Publish(msgspec.Struct, tag=True):
    """Write a snapshot of the table at `base` with these blocks on top."""

    table: str
    base: str
    etag: str
    """Another one means another base, even at the same location."""
    directory: str
    name: str
    """How the names of its files begin."""
    snapshot_id: int
    blocks: tuple[str, ...]


class Forget(msgspec.Struct, tag=True):
    """These blocks are in no snapshot to come."""

    blocks: tuple[str, ...]


class Unknown(msgspec.Struct, tag=True):
    """Blocks were named that this process did not write; an earlier one may have."""


class Done(msgspec.Struct, tag=True):
    pass


class Published(msgspec.Struct, tag=True):
    """Where the metadata file is, the files written with it, and how long it is."""

    location: str
    files: tuple[str, ...]
    size: int


class Failed(msgspec.Struct, tag=True):
    message: str
    code: str
    transient: bool

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if isinstance(error, ZombiError):
            return cls(str(error), error.code, isinstance(error, TransientError))
        return cls(f"{type(error).__name__}: {error}", ZombiError.code, transient=False)

    def error(self) -> ZombiError:
        kind = TransientError if self.transient else ZombiError
        return kind(f"the live view could not be staged: {self.message}", code=self.code)


Request = Hello | Stage | Publish | Forget
Reply = Done | Published | Unknown | Failed

requests: Final = msgspec.json.Decoder(Request)
replies: Final = msgspec.json.Decoder(Reply)


def line(message: Request | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"
