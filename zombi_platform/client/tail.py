"""Following a table: its last events, then what is new.

A `Tail` keeps one place for each partition, so memory does not grow with the table. A fault
in the middle moves no place past an event that was not given out: calling again goes on
there. What the pipeline has moved to Iceberg and deleted is skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zombi_platform.client.calls import Event, GatewayClient, Marks

PAGE_EVENTS: Final = 1000


class Tail:
    """Where a reader of a table is; `missed` counts events deleted before they were read."""

    def __init__(self, client: GatewayClient, table: str, partition: int | None = None) -> None:
        self.missed = 0
        self._client = client
        self._table = table
        self._partition = partition
        self._next: dict[int, int] = {}

    def last(self, count: int) -> list[Event]:
        """The last events there are, by time; `new` goes on after them."""
        found: list[Event] = []
        places: dict[int, int] = {}
        for number, marks in self._marks().items():
            end = marks.high_watermark
            places[number] = end + 1
            for page in self._pages(number, max(end - count + 1, 1), end):
                found += page
            found.sort(key=lambda event: (event.timestamp_ms, event.partition, event.sequence))
            del found[: max(len(found) - count, 0)]
        self._next |= places
        return found

    def new(self) -> Iterator[Event]:
        """What came since, partition by partition, each in the order of its sequence."""
        for number, marks in self._marks().items():
            end = marks.high_watermark
            # A data directory that was lost begins again below where this reader was.
            place = min(self._next.get(number, 1), end + 1)
            for page in self._pages(number, place, end):
                for event in page:
                    self.missed += event.sequence - place
                    self._next[number] = place = event.sequence + 1
                    yield event
            self.missed += end + 1 - place
            self._next[number] = end + 1

    def _marks(self) -> dict[int, Marks]:
        marks = self._client.watermarks(self._table)
        if self._partition is None:
            return marks
        return {number: found for number, found in marks.items() if number == self._partition}

    def _pages(self, partition: int, first: int, last: int) -> Iterator[list[Event]]:
        """What is still there of the sequences `first` to `last`."""
        while first <= last:
            limit = min(last - first + 1, PAGE_EVENTS)
            page = self._client.read(self._table, partition=partition, offset=first, limit=limit)
            events = [event for event in page.records if event.sequence <= last]
            if not events:
                return
            yield events
            first = events[-1].sequence + 1
