"""Whether a report fits the split it is about, and what to say when a cut is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zombi_platform.cuts import Cut, Split, StagedFile
from zombi_platform.errors import InvalidRequestError, NotFoundError
from zombi_platform.events import SEQUENCE_MAX, TIMESTAMP_MS_MAX

HOUR_MAX: Final = TIMESTAMP_MS_MAX // 3_600_000


def check_files(split: Split, files: Sequence[StagedFile]) -> None:
    """Raise unless the files hold, by what is said of them, exactly the split's events."""
    ranges = {part.partition: part for part in split.ranges}
    counts = dict.fromkeys(ranges, 0)
    for file in files:
        part = ranges.get(file.partition)
        inside = part is not None and part.first <= file.first <= file.last <= part.last
        if file.split != split.number or not inside:
            raise InvalidRequestError(
                f"{file.path!r} has split {file.split}, partition {file.partition}, sequences "
                f"{file.first} to {file.last}: not within split {split.number}"
            )
        if not 0 < file.events <= file.last - file.first + 1:
            raise InvalidRequestError(
                f"{file.path!r} cannot have {file.events} events from sequence {file.first} "
                f"to {file.last}"
            )
        if not (0 <= file.hour <= HOUR_MAX and 0 < file.bytes <= SEQUENCE_MAX):
            raise InvalidRequestError(
                f"{file.path!r} cannot have hour {file.hour} and {file.bytes} bytes"
            )
        counts[file.partition] += file.events
    if len({file.path for file in files}) != len(files):
        raise InvalidRequestError("a path is there twice")
    for number, part in ranges.items():
        if counts[number] != part.events:
            raise InvalidRequestError(
                f"the files hold {counts[number]} events of partition {number}, but split "
                f"{split.number} has {part.events}"
            )


def find_split(cut: Cut, number: int) -> Split:
    if not 0 <= number < len(cut.splits):
        raise no_split(cut.table, cut.id, number)
    return cut.splits[number]


def no_cut(table: str, cut_id: int) -> NotFoundError:
    return NotFoundError(
        f"table {table!r} has no cut {cut_id}: it is cleaned, or never was", code="CUT_NOT_FOUND"
    )


def no_split(table: str, cut_id: int, number: int) -> NotFoundError:
    return NotFoundError(
        f"cut {cut_id} of table {table!r} has no split {number}", code="SPLIT_NOT_FOUND"
    )
