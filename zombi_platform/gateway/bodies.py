"""Request bodies: content encodings undone within the body limit.

A decompressor never produces more than the limit plus one byte, so a small body cannot
become a large one (a "bomb" is 413 like any other body over the limit).
"""

from __future__ import annotations

import zlib

import zstandard

from zombi_platform.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedMediaError


def too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is over {limit} bytes (ZOMBI_MAX_BODY_MB); send smaller batches"
    )


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
