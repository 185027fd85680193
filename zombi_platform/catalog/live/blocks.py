"""Which hot rows are staged already, which must be, and that nothing is left out: pure values.

A block is one Parquet file that holds a range of sequences of each of some partitions. It
never changes; a live snapshot is the committed files plus blocks that together hold every
sequence past the lake's watermarks exactly once (INV-11). Blocks end where cuts end, so a
commit makes whole blocks needless and does not cross one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from zombi_platform.cuts import Range
from zombi_platform.errors import TransientError

BLOCKS_MAX: Final = 16
"""Past so many small blocks some are staged anew as one."""
BLOCK_EVENTS_MAX: Final = 262_144
BLOCK_BYTES_MAX: Final = 64 * 2**20
"""A block is begun anew past either; one that has half as many is never merged again."""
BLOCK_AGE_SECS_MAX: Final = 6 * 3600
"""No answer refers to a block staged or a snapshot made longer ago: whoever finds an older file
may delete it after the longest query, without knowing who made it."""


class CoverError(TransientError):
    """Blocks that leave a sequence out or hold one twice; looking anew helps."""

    code = "LIVE_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Block:
    """Staged rows; `staged_at` is a time of the clock that never jumps."""

    location: str
    ranges: tuple[Range, ...]
    staged_at: float

    @property
    def events(self) -> int:
        return sum(part.events for part in self.ranges)


@dataclass(frozen=True, slots=True)
class Hot:
    """One partition as the hot buffer shows it, all at one moment."""

    partition: int
    last: int
    """The high watermark."""
    cut: int
    """Where the last cut ends."""
    event_bytes: int
    """What an event takes on average."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that stay and the ranges of those to stage, in order."""

    kept: tuple[Block, ...]
    missing: tuple[tuple[Range, ...], ...]


def plan_blocks(
    blocks: Sequence[Block], watermarks: Mapping[int, int], hot: Sequence[Hot], now: float
) -> Plan:
    """What a snapshot needs that holds everything past the watermarks."""
    highs = {member.partition: member.last for member in hot}
    kept = _usable(blocks, watermarks, highs, now)
    reached = _ends(kept, watermarks)
    if len(kept) >= BLOCKS_MAX and any(reached.get(p, 0) < last for p, last in highs.items()):
        kept = kept[: _merge_from(kept)]
        reached = _ends(kept, watermarks)
    return Plan(tuple(kept), tuple(_missing(reached, hot)))


def check_cover(
    blocks: Sequence[Block], watermarks: Mapping[int, int], highs: Mapping[int, int]
) -> None:
    """Raise unless committed rows and blocks hold every sequence up to the highs once."""
    reached = dict(watermarks)
    for part in (part for block in blocks for part in block.ranges):
        end = reached.get(part.partition, 0)
        if part.first != end + 1:
            raise CoverError(
                f"partition {part.partition} is covered up to {end} and goes on at {part.first}"
            )
        reached[part.partition] = part.last
    short = {p: last for p, last in highs.items() if reached.get(p, 0) < last}
    if short:
        raise CoverError(f"sequences up to {short} are wanted, {reached} are covered")


def _usable(
    blocks: Sequence[Block], watermarks: Mapping[int, int], highs: Mapping[int, int], now: float
) -> list[Block]:
    """The blocks that go on where the lake ends, up to the first that does not fit."""
    kept: list[Block] = []
    reached = dict(watermarks)
    for block in blocks:
        if all(part.last <= watermarks.get(part.partition, 0) for part in block.ranges):
            continue
        fits = all(
            part.first == reached.get(part.partition, 0) + 1
            and part.last <= highs.get(part.partition, 0)
            for part in block.ranges
        )
        if not fits or now - block.staged_at > BLOCK_AGE_SECS_MAX:
            break
        kept.append(block)
        reached.update((part.partition, part.last) for part in block.ranges)
    return kept


def _ends(blocks: Iterable[Block], watermarks: Mapping[int, int]) -> dict[int, int]:
    ends = dict(watermarks)
    for block in blocks:
        ends.update((part.partition, part.last) for part in block.ranges)
    return ends


def _merge_from(blocks: Sequence[Block]) -> int:
    """Where the blocks to merge begin: each one that stays is twice what comes after it.

    So an event is staged again only a few times, however many loads see it.
    """
    start, events = len(blocks), 0
    for block in reversed(blocks):
        settled = block.events >= BLOCK_EVENTS_MAX // 2
        if settled or (events and block.events > 2 * events):
            break
        start -= 1
        events += block.events
    return start


def _missing(reached: Mapping[int, int], hot: Sequence[Hot]) -> list[tuple[Range, ...]]:
    """Ranges from where coverage ends to the high watermarks, a tuple for each block."""
    of_cuts, beyond = [], []
    for member in hot:
        first = reached.get(member.partition, 0) + 1
        middle = min(max(member.cut, first - 1), member.last)
        if first <= middle:
            of_cuts.append((member, Range(member.partition, first, middle)))
        if middle < member.last:
            beyond.append((member, Range(member.partition, middle + 1, member.last)))
    return [*_portions(of_cuts), *_portions(beyond)]


def _portions(ranges: Sequence[tuple[Hot, Range]]) -> list[tuple[Range, ...]]:
    """The ranges in portions of at most one block each."""
    portions: list[tuple[Range, ...]] = []
    portion: list[Range] = []
    events_left, bytes_left = BLOCK_EVENTS_MAX, BLOCK_BYTES_MAX
    for member, whole in ranges:
        size, first = max(member.event_bytes, 1), whole.first
        while first <= whole.last:
            room = min(events_left, bytes_left // size)
            if room <= 0 and portion:
                portions.append(tuple(portion))
                portion, events_left, bytes_left = [], BLOCK_EVENTS_MAX, BLOCK_BYTES_MAX
                continue
            part = Range(whole.partition, first, min(whole.last, first + max(room, 1) - 1))
            portion.append(part)
            events_left -= part.events
            bytes_left -= part.events * size
            first = part.last + 1
    if portion:
        portions.append(tuple(portion))
    return portions
