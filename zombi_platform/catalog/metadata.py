"""Table metadata as bytes: passed through, trimmed or extended without being understood whole.

A metadata file may list a thousand snapshots, and every load of the table answers with all
of it. So only the outermost level is ever taken apart here, and what nobody asks about
stays the bytes it was. Nothing here does I/O.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from zombi_platform.errors import CorruptionError

GZIP: Final = b"\x1f\x8b"

Sections = dict[str, msgspec.Raw]
"""The outermost level of a metadata file."""


class _Reference(msgspec.Struct, rename="kebab"):
    snapshot_id: int


class _Listed(msgspec.Struct, rename="kebab"):
    snapshot_id: int


_sections = msgspec.json.Decoder(Sections)
_references = msgspec.json.Decoder(dict[str, _Reference])
_snapshots = msgspec.json.Decoder(list[msgspec.Raw])
_listed = msgspec.json.Decoder(_Listed)


def plain(content: bytes) -> bytes:
    """The JSON of a metadata file, which other writers may have compressed."""
    return gzip.decompress(content) if content[:2] == GZIP else content


def split(content: bytes) -> Sections:
    """The outermost level of a metadata file, each section still as bytes."""
    try:
        return _sections.decode(content)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"a metadata file is not the JSON it should be: {error}") from error


def join(sections: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(sections)


def only_referenced(content: bytes) -> bytes:
    """The metadata with no snapshots but those that a branch or tag names."""
    sections = split(content)
    references = _references.decode(sections.get("refs", b"{}"))
    named = {reference.snapshot_id for reference in references.values()}
    sections["snapshots"] = msgspec.Raw(
        msgspec.json.encode(
            [
                snapshot
                for snapshot in _snapshots.decode(sections.get("snapshots", b"[]"))
                if _listed.decode(snapshot).snapshot_id in named
            ]
        )
    )
    return join(sections)


def load_answer(location: str, content: bytes, config: Mapping[str, str]) -> bytes:
    """The body that answers a load: Iceberg's `LoadTableResult`."""
    return b'{"metadata-location":%b,"metadata":%b,"config":%b}' % (
        msgspec.json.encode(location),
        content,
        msgspec.json.encode(dict(config)),
    )
