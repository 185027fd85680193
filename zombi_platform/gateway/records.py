"""What all decoders of write requests share: what they return, and checks on records.

A check that fails raises with the index of the record, counted over the whole request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from zombi_platform.errors import InvalidRequestError, PayloadTooLargeError
from zombi_platform.events import HEADERS_BYTES_MAX, HEADERS_MAX, IDEMPOTENCY_KEY_BYTES_MAX
from zombi_platform.hot import Segment

Headers = dict[str, str] | None

Places = list[int] | npt.NDArray[Any] | None
"""The partition of each record of a request, in order; None when all share one."""

Decoded = tuple[list[Segment], Places]


def check_count(count: int, limit: int) -> None:
    if count == 0:
        raise InvalidRequestError("the request has no records")
    if count > limit:
        raise PayloadTooLargeError(
            f"{count} records are more than {limit} (ZOMBI_MAX_BULK_RECORDS); send smaller batches",
            code="TOO_MANY_RECORDS",
        )


def text_keys(keys: Sequence[str | None]) -> list[bytes] | None:
    """Idempotency keys as bytes, empty where there is none; None when no record has one."""
    if not any(keys):
        return None
    return [check_key((key or "").encode(), index) for index, key in enumerate(keys)]


def check_key(key: bytes, index: int | None) -> bytes:
    if len(key) > IDEMPOTENCY_KEY_BYTES_MAX:
        where = "" if index is None else f"record {index}: "
        raise InvalidRequestError(
            f"{where}idempotency_key has {len(key)} bytes, at most {IDEMPOTENCY_KEY_BYTES_MAX} fit"
        )
    return key


def check_headers(headers: list[Headers]) -> list[Headers] | None:
    """The headers of all records if they are within the limits; None when no record has any."""
    if not any(headers):
        return None
    for index, entry in enumerate(headers):
        if not entry:
            continue
        if None in entry.values():
            raise InvalidRequestError(f"record {index}: a header is null, it must be text")
        size = sum(len(name) + len(value) for name, value in entry.items())
        if len(entry) > HEADERS_MAX or size > HEADERS_BYTES_MAX:
            raise InvalidRequestError(
                f"record {index}: {len(entry)} headers of {size} characters; at most "
                f"{HEADERS_MAX} of {HEADERS_BYTES_MAX} fit"
            )
    return headers
