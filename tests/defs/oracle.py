"""What was acked, held against what is there: in the table or still hot, and never twice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

BATCH = 500
PAUSE_SECS = 0.1
"""Between two writes: what matters is what dies when, not how much is written."""

PAYLOAD_CHARS = 100


@dataclass
class Oracle:
    """Writes to one table from a thread until told to stop, and remembers every ack."""

    url: str
    table: str
    partitions: int = 2
    acked: dict[tuple[int, int], str] = field(default_factory=dict)
    sent: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Oracle:
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _write_on(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as http:
            while not self._stop.wait(PAUSE_SECS):
                try:
                    self.write(http)
                except httpx.TransportError:
                    # It was killed; what it did not ack is not ours to miss.
                    self._stop.wait(0.1)

    def write(self, http: httpx.Client, count: int = BATCH) -> None:
        records = [
            {
                "payload": f"{self.sent + number}".ljust(PAYLOAD_CHARS, "."),
                "partition": number % self.partitions,
                "timestamp_ms": time.time_ns() // 1_000_000,
            }
            for number in range(count)
        ]
        self.sent += count
        answer = http.post(f"/tables/{self.table}/bulk", json={"records": records})
        if answer.status_code == 503:
            self._stop.wait(0.2)
            return
        assert answer.status_code == 202, answer.text
        for record, offset in zip(records, answer.json()["offsets"], strict=True):
            self.acked[int(str(record["partition"])), offset] = str(record["payload"])


def committed(settings: Settings, table: str) -> Counter[tuple[int, int, str]]:
    """Every row of the table, with how often it is there."""
    found = Lake(settings).load(table)
    if found is None:
        return Counter()
    rows = found[0].scan(selected_fields=("partition", "sequence", "payload")).to_arrow()
    columns = (rows[name].to_pylist() for name in ("partition", "sequence", "payload"))
    return Counter((p, s, payload.decode()) for p, s, payload in zip(*columns, strict=True))


def check(oracle: Oracle, settings: Settings) -> None:
    """Every acked event is in the table with its own payload, and no place is there twice."""
    rows = committed(settings, oracle.table)
    assert set(rows.values()) <= {1}, "a row is there twice"
    places = {(p, s): payload for p, s, payload in rows}
    assert len(places) == len(rows), "a sequence was given out twice"
    missing = {place for place, payload in oracle.acked.items() if places.get(place) != payload}
    assert not missing, f"{len(missing)} of {len(oracle.acked)} acked events are not in the lake"
