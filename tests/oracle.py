"""The oracle: what producers were acked, against what the lake and the hot buffer hold.

Writers send keyed bulks without end and repeat a bulk until it is acked, so at the end the
acked set is exactly what must exist: each event once, in the table or in the hot buffer.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from zombi_platform.catalog.duckdb import iceberg_duckdb

PARTITIONS = 4
HOUR_MS = 3_600_000
HOURS = 3
BASE_MS = 1_700_000_000_000

Place = tuple[int, int]
"""Partition and sequence of an event."""


@dataclass
class Writer:
    """One producer; `port` may change while it runs, as a gateway comes back elsewhere."""

    name: str
    address: list[int]
    table: str = "t"
    bulk: int = 20
    pause_secs: float = 0.05
    """Between two bulks: the tests are about what dies when, not about how much."""
    acked: dict[Place, str] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    sent: int = 0

    def run(self) -> None:
        while not self.stopping.wait(self.pause_secs):
            records = [self._record(self.sent * self.bulk + i) for i in range(self.bulk)]
            self.sent += 1
            offsets = self._post_until_acked(records)
            for record, offset in zip(records, offsets, strict=True):
                place = (record["partition"], offset)
                assert place not in self.acked, f"{place} was given out twice"
                self.acked[place] = record["payload"]

    def _record(self, number: int) -> dict[str, Any]:
        text = f"{self.name}/{number}"
        return {
            "payload": text,
            "partition": number % PARTITIONS,
            "timestamp_ms": BASE_MS + number * HOUR_MS // 97 % (HOURS * HOUR_MS),
            "idempotency_key": text,
        }

    def _post_until_acked(self, records: list[dict[str, Any]]) -> list[int]:
        body = json.dumps({"records": records})
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.address[0], timeout=60)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", f"/tables/{self.table}/bulk", body, headers)
                response = connection.getresponse()
                data = response.read()
                if response.status == 202:
                    offsets: list[int] = json.loads(data)["offsets"]
                    return offsets
                assert response.status == 503, data
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            # The gateway is down or full: it is tried again a moment later, as producers do.
            threading.Event().wait(0.02)


class Writers:
    """Several writers in threads, with what all of them were acked."""

    def __init__(self, port: int, table: str = "t", count: int = 3) -> None:
        self.address = [port]
        self._writers = [Writer(f"{table}-w{i}", self.address, table) for i in range(count)]
        self._threads = [threading.Thread(target=writer.run) for writer in self._writers]
        for thread in self._threads:
            thread.start()

    def move(self, port: int) -> None:
        self.address[0] = port

    def wait_for(self, events: int) -> None:
        """Wait until this many more events were acked."""
        goal = self.count() + events
        while self.count() < goal:
            threading.Event().wait(0.005)

    def count(self) -> int:
        return sum(len(writer.acked) for writer in self._writers)

    def stop(self) -> dict[Place, str]:
        for writer in self._writers:
            writer.stopping.set()
        for thread in self._threads:
            thread.join()
        acked: dict[Place, str] = {}
        for writer in self._writers:
            assert not acked.keys() & writer.acked.keys(), "two writers got one sequence"
            acked |= writer.acked
        return acked


def rows_in_lake(metadata_location: str | None) -> dict[Place, str]:
    """Every row of the table by an independent reader; asserts that none is there twice."""
    if metadata_location is None:
        return {}
    with iceberg_duckdb() as connection:
        found = connection.execute(
            f"SELECT partition, sequence, payload FROM iceberg_scan('{metadata_location}')"
        ).fetchall()
    places = Counter((partition, sequence) for partition, sequence, _ in found)
    twice = [place for place, count in places.items() if count > 1]
    assert not twice, f"{len(twice)} events are in the table twice, such as {twice[:3]}"
    return {(partition, sequence): bytes(data).decode() for partition, sequence, data in found}


def rows_in_hot(port: int, table: str = "t") -> dict[Place, str]:
    found: dict[Place, str] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for partition in range(PARTITIONS):
        offset, more = 1, True
        while more:
            connection.request(
                "GET", f"/tables/{table}?partition={partition}&offset={offset}&limit=10000"
            )
            page = json.loads(connection.getresponse().read())
            for record in page["records"]:
                found[partition, record["sequence"]] = record["payload"]
            more = page["has_more"]
            offset = page["records"][-1]["sequence"] + 1 if page["records"] else offset
    connection.close()
    return found


def check(acked: dict[Place, str], lake: dict[Place, str], hot: dict[Place, str]) -> None:
    """Table and hot together hold what was acked, each event in one place."""
    both = lake.keys() & hot.keys()
    assert all(lake[place] == hot[place] for place in both), "a sequence stands for two events"
    union = lake | hot
    missing = acked.keys() - union.keys()
    assert not missing, f"{len(missing)} acked events are gone, such as {sorted(missing)[:3]}"
    assert union == acked, f"{len(union.keys() - acked.keys())} events were never acked"
    assert len(set(union.values())) == len(union), "an event is there twice"
