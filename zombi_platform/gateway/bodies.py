"""Request bodies: content encodings undone within the body limit.

A decompressor never produces more than the limit plus one byte, so a small body cannot
become a large one (a "bomb" is 413 like any other body over the limit).
"""

from __future__ import annotations

import zlib

import zstandard

from zombi_platform.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaError,
)


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
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(
            body, read_across_frames=True
        )
        data = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequestError(f"the zstd body is broken: {error}") from error
    if len(data) > limit:
        raise too_large(limit)
    if body and not data and not _is_empty_zstd(body):
        raise InvalidRequestError("the zstd body is cut short")
    return data


def _is_empty_zstd(body: bytes) -> bool:
    try:
        return bool(zstandard.frame_content_size(body) == 0)
    except zstandard.ZstdError:
        return False
