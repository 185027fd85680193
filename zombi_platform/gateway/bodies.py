"""Request bodies: content encodings undone within the body limit.

A decompressor never produces more than the limit plus one byte, so a small body cannot
become a large one (a "bomb" is 413 like any other body over the limit).
"""

from __future__ import annotations

import zlib
from typing import Final

import zstandard

from zombi_platform.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaError,
)

WINDOW_BYTES_MAX: Final = 2**27


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is over {limit} bytes (ZOMBI_MAX_BODY_MB); send smaller batches"
    )


class Arriving:
    """Bytes of bodies that have begun to arrive, over all connections, within a limit.

    Slow senders fill it; a request that arrives at once never meets it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    def take(self, size: int) -> None:
        """Count these bytes, or raise; one body alone always fits."""
        if self._held and self._held + size > self._limit:
            raise OverloadedError(
                f"{self._held} bytes of requests are arriving, at most {self._limit} may be "
                "(ZOMBI_MAX_INFLIGHT_BYTES_MB); retry shortly"
            )
        self._held += size

    def give_back(self, size: int) -> None:
        self._held -= size


def decompress(body: bytes, encoding: bytes, limit: int) -> bytes:
    """The body as it was before `Content-Encoding`."""
    match encoding.strip().lower():
        case b"identity" | b"":
            return body
        case b"gzip":
            return _gunzip(body, limit)
        case b"zstd":
            return _unzstd(body, limit)
    raise UnsupportedMediaError(
        f"content encoding {encoding[:40]!r} is not supported: use gzip, zstd or none",
        code="UNSUPPORTED_ENCODING",
    )


def _gunzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit + 1
    while body:
        inflater = zlib.decompressobj(wbits=31)
        try:
            part = inflater.decompress(body, room)
        except zlib.error as error:
            raise InvalidRequestError(f"the gzip body is broken: {error}") from error
        parts.append(part)
        room -= len(part)
        if room <= 0:
            raise too_large(limit)
        if not inflater.eof:
            raise InvalidRequestError("the gzip body is cut short")
        body = inflater.unused_data
    return b"".join(parts)


def _unzstd(body: bytes, limit: int) -> bytes:
    """One frame, whole: what follows it would be lost, so nothing may."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        if zstandard.frame_content_size(body) > limit:
            raise too_large(limit)
        return decompressor.decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if _is_larger(body, limit):
            raise too_large(limit) from error
        raise InvalidRequestError(f"the zstd body is broken: {error}") from error


def _is_larger(body: bytes, limit: int) -> bool:
    """Whether a frame that does not say its size is past the limit, or else broken."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        return len(decompressor.stream_reader(body).read(limit + 1)) > limit
    except zstandard.ZstdError:
        return False
