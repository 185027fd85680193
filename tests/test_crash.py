"""kill -9 under load: every acked event is there afterwards, once, with its sequence."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import Gateway, running

KILLS = 10
ACKS_BEFORE_KILL = 150


@dataclass
class Producer:
    """Writes until its connection dies; remembers acks, and the write left without one."""

    name: str
    port: int
    acked: dict[tuple[int, int], str] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    sent: int = 0
    died_writing: bool = False

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            while True:
                self.write(connection)
        except (OSError, http.client.HTTPException):
            self.died_writing = True
        finally:
            connection.close()

    def write(self, connection: http.client.HTTPConnection) -> None:
        kind = self.name.split("-")[0]
        number, self.sent = self.sent, self.sent + 1
        if kind == "bulk":
            items = [{"payload": f"{self.name}/{number}/{i}", "partition": i % 3} for i in range(7)]
            answer = post(connection, "/tables/t/bulk", {"records": items})
            for item, offset in zip(items, answer["offsets"], strict=True):
                self.acked[item["partition"], offset] = item["payload"]
            return
        event: dict[str, Any] = {"payload": f"{self.name}/{number}", "partition": number % 3}
        if kind == "keyed":
            event["idempotency_key"] = event["payload"]
        answer = post(connection, "/tables/t", event)
        place = (answer["partition"], answer["offset"])
        self.acked[place] = event["payload"]
        if kind == "keyed":
            self.keys[event["payload"]] = place


def post(connection: http.client.HTTPConnection, path: str, body: object) -> dict[str, Any]:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    assert response.status == 202, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def stored(gateway: Gateway) -> dict[tuple[int, int], str]:
    """Everything in the hot buffer; asserts that each partition is gapless from 1."""
    found: dict[tuple[int, int], str] = {}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    for partition in range(3):
        offset, more = 1, True
        while more:
            path = f"/tables/t?partition={partition}&offset={offset}&limit=10000"
            connection.request("GET", path)
            page = json.loads(connection.getresponse().read())
            for record in page["records"]:
                assert record["sequence"] == offset, "a gap or a sequence twice"
                found[partition, offset] = record["payload"]
                offset += 1
            more = page["has_more"]
    connection.close()
    return found


def load_and_kill(gateway: Gateway, life: int) -> list[Producer]:
    names = [f"{kind}-{life}-{i}" for kind in ("single", "bulk", "keyed") for i in range(3)]
    producers = [Producer(name, gateway.port) for name in names]
    threads = [threading.Thread(target=producer.run) for producer in producers]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    while min(producer.sent for producer in producers) < ACKS_BEFORE_KILL // len(producers):
        pause.wait(0.002)
    gateway.kill()
    for thread in threads:
        thread.join()
    assert all(producer.died_writing for producer in producers), "a client was not writing"
    return producers


@pytest.mark.parametrize("durability", ["fsync", "wal"])
def test_acked_events_survive_kill_nine(tmp_path: Path, durability: str) -> None:
    acked: dict[tuple[int, int], str] = {}
    keys: dict[str, tuple[int, int]] = {}
    for life in range(KILLS):
        with running(tmp_path, durability=durability) as gateway:
            for producer in load_and_kill(gateway, life):
                assert not acked.keys() & producer.acked.keys(), "a sequence was reused"
                acked |= producer.acked
                keys |= producer.keys
        with running(tmp_path, durability=durability) as gateway:
            found = stored(gateway)
            assert {place: found.get(place) for place in acked} == acked
            assert len(set(found.values())) == len(found), "an event is there twice"
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
            for key, (partition, offset) in list(keys.items())[-20:]:
                event = {"payload": key, "partition": partition, "idempotency_key": key}
                assert post(connection, "/tables/t", event)["offset"] == offset
            connection.close()


def test_sigterm_stops_cleanly_and_a_taken_port_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "a") as first:
        with pytest.raises(AssertionError, match="did not start"):
            Gateway(tmp_path / "b", port=str(first.port))
        assert first.stop() == 0


def test_a_start_that_fails_late_still_ends(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not start"):
        Gateway(tmp_path, warehouse="ftp://nowhere")
