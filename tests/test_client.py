"""The Python client against a real gateway: nothing lost, nothing twice, errors that say why."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway import Gateway, running
from tests.proxy import losing_answers
from zombi_platform.client import Event, GatewayClient, Producer, Receipt, Tail
from zombi_platform.errors import (
    ForbiddenError,
    GatewayUnreachableError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    SettingsError,
    TerminalError,
    TransientError,
    UnauthorizedError,
)
from zombi_platform.gateway.tokens import create_token

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("data"), max_bulk_records="500") as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[GatewayClient]:
    with GatewayClient(gateway.url) as client:
        yield client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stored(client: GatewayClient, table: str) -> dict[tuple[int, int], bytes]:
    """Everything in the hot buffer; asserts that each partition is gapless from 1."""
    found: dict[tuple[int, int], bytes] = {}
    for partition, marks in client.watermarks(table).items():
        while len(found) < 10**6:
            have = sum(place[0] == partition for place in found)
            page = client.read(table, partition=partition, offset=have + 1, limit=10_000)
            for number, event in enumerate(page.records, have + 1):
                assert event.sequence == number, "a gap or a sequence twice"
                found[partition, number] = event.data
            if not page.has_more:
                break
        assert have + len(page.records) == marks.high_watermark
    return found


def check_all_there_once(
    client: GatewayClient, table: str, receipts: dict[bytes, Receipt], partitions: int
) -> None:
    """Each event is stored once, where its receipt says, in the order it was sent in."""
    found = stored(client, table)
    assert sorted(found.values()) == sorted(receipts)
    assert all(found[receipt.result(0)] == payload for payload, receipt in receipts.items())
    for partition in range(partitions):
        sent = [payload for payload, r in receipts.items() if r.result(0).partition == partition]
        assert [data for place, data in found.items() if place[0] == partition] == sent


def test_lost_answers_neither_lose_nor_double_events(
    gateway: Gateway, client: GatewayClient
) -> None:
    receipts: dict[bytes, Receipt] = {}
    with losing_answers(gateway.port) as proxy:
        with Producer(proxy.url, "cut", batch_events=100) as producer:
            for number in range(1000):
                payload = b"%d" % number
                receipts[payload] = producer.send(payload, partition=number % 3)
        assert proxy.answers == 20
    check_all_there_once(client, "cut", receipts, 3)


def test_kill_nine_under_a_producer_neither_loses_nor_doubles_events(tmp_path: Path) -> None:
    port = str(free_port())
    receipts: dict[bytes, Receipt] = {}
    enough = threading.Event()

    def produce(producer: Producer) -> None:
        number = 0
        while not enough.is_set():
            payload = b"%d" % number
            receipts[payload] = producer.send(payload, partition=number % 3)
            number += 1

    with Producer(f"http://127.0.0.1:{port}", "t", batch_events=50, queue_events=500) as producer:
        thread = threading.Thread(target=produce, args=(producer,))
        thread.start()
        try:
            for _ in range(3):
                before = producer.acked
                with running(tmp_path, port=port) as gateway:
                    while producer.acked < before + 500:
                        threading.Event().wait(0.002)
                    gateway.kill()
        finally:
            enough.set()
        with running(tmp_path, port=port) as gateway:
            thread.join()
            producer.flush()
            with GatewayClient(gateway.url) as client:
                check_all_there_once(client, "t", receipts, 3)


def test_retry_after_is_obeyed_and_a_full_buffer_waited_out(tmp_path: Path) -> None:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    with running(tmp_path, port=port, max_hot_bytes_mb="1"):
        with Producer(url, "t") as filler:
            filler.send(bytes(2**20))
        hasty = Producer(url, "t", delivery_secs=3)
        hasty.send(b"too late")
        # The gateway asks for 5 s: another try within 3 s would disobey it.
        with pytest.raises(TransientError, match=r"1 events were given up after 1 tries.*hot buff"):
            hasty.close()
        patient = Producer(url, "t")
        receipt = patient.send(b"in time")
        with GatewayClient(url) as client:
            while client.stats()["errors_total"] < 2:
                threading.Event().wait(0.01)
    with running(tmp_path, port=port):
        patient.close()
        assert receipt.result(0) == (0, 2)


def test_a_rejected_event_is_named_and_its_neighbours_are_stored(
    gateway: Gateway, client: GatewayClient
) -> None:
    producer = Producer(gateway.url, "rejects", linger_secs=60)
    receipts = [producer.send(b"%d" % n, partition=n % 2) for n in range(10)]
    too_long = producer.send(b"key", key="k" * 2000)
    no_number = producer.send(b"time", timestamp_ms="noon")  # type: ignore[arg-type]
    too_early = producer.send(b"time", timestamp_ms=-1)
    receipts += [producer.send(b"%d" % n, partition=n % 2) for n in range(10, 20)]
    with pytest.raises(InvalidRequestError, match="event 11: idempotency_key has 2000 bytes"):
        producer.flush()
    with pytest.raises(InvalidRequestError, match=r"event 12: .*'noon'"):
        no_number.result(0)
    with pytest.raises(InvalidRequestError, match="event 13: timestamp_ms -1 is out of range"):
        too_early.result(0)
    with pytest.raises(InvalidRequestError, match="event 11"):
        too_long.result(0)
    assert (producer.acked, producer.failed) == (20, 3)
    check_all_there_once(client, "rejects", {b"%d" % n: r for n, r in enumerate(receipts)}, 2)
    producer.close()


def test_wrong_arguments_are_refused_where_they_are_given(gateway: Gateway) -> None:
    with Producer(gateway.url, "wrong") as producer:
        with pytest.raises(InvalidRequestError, match="payload is dict: give bytes or str"):
            producer.send({"id": 1})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="partition -1 is out of range"):
            producer.send(b"x", partition=-1)
    with pytest.raises(TerminalError, match="closed"):
        producer.send(b"x")
    with pytest.raises(InvalidRequestError, match="invalid table name"):
        Producer(gateway.url, "no/table")
    with pytest.raises(SettingsError, match="must begin with http://"):
        Producer("localhost:8080", "t")


def test_batches_past_the_gateways_limits_are_halved(
    gateway: Gateway, client: GatewayClient
) -> None:
    # The gateway takes 500 records and 16 MB at once.
    with Producer(gateway.url, "halved", batch_events=2000) as producer:
        receipts = {b"%d" % n: producer.send(b"%d" % n) for n in range(2000)}
    check_all_there_once(client, "halved", receipts, 1)
    large = Producer(gateway.url, "large", batch_bytes=2**26, linger_secs=60)
    kept = [large.send(bytes(7 * 2**20)) for _ in range(3)]
    hopeless = large.send(bytes(17 * 2**20))
    with pytest.raises(PayloadTooLargeError, match="event 4: the body is over"):
        large.close()
    assert [receipt.result(0).offset for receipt in kept] == [1, 2, 3]
    with pytest.raises(PayloadTooLargeError):
        hopeless.result(0)


def test_the_callers_keys_give_the_first_offset(gateway: Gateway) -> None:
    with Producer(gateway.url, "keys") as producer:
        first = [producer.send(b"x", key=key) for key in ("b", "a")]
        producer.flush()
        again = [producer.send(b"x", key=key) for key in ("a", "c", "b", "a")]
        producer.flush()
    assert [receipt.result(0).offset for receipt in first] == [1, 2]
    assert [receipt.result(0).offset for receipt in again] == [2, 3, 1, 2]


def test_any_bytes_headers_and_times_arrive_as_they_were_sent(
    gateway: Gateway, client: GatewayClient
) -> None:
    with Producer(gateway.url, "faithful") as producer:
        producer.send(b"\xff\x00", partition=2**32 - 1, timestamp_ms=7, headers={"a": "ü"})
        producer.send("ünï", key="k")
    [binary] = client.read("faithful", partition=2**32 - 1).records
    assert (binary.data, binary.timestamp_ms, binary.headers) == (b"\xff\x00", 7, {"a": "ü"})
    [text] = client.read("faithful", partition=0).records
    assert (text.payload, text.idempotency_key, text.headers) == ("ünï", "k", None)
    assert text.timestamp_ms > 1_700_000_000_000


def test_a_full_queue_refuses_or_waits() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    refusing = Producer(nobody, "t", queue_events=10, block=False)
    for _ in range(10):
        refusing.send(b"x")
    with pytest.raises(OverloadedError, match="10 events of"):
        refusing.send(b"x")
    full = Producer(nobody, "t", queue_bytes=1000)
    full.send(bytes(900))
    outcomes: list[str] = []

    def send_more() -> None:
        try:
            full.send(bytes(900))
        except TerminalError as error:
            outcomes.append(str(error))

    sending = threading.Thread(target=send_more)
    sending.start()
    for producer in (refusing, full):
        with pytest.raises(TransientError, match="not answered"):
            producer.close(timeout=0.1)
    sending.join()
    assert outcomes == ["the producer is closed and takes no more events"]


def test_an_unreachable_gateway_is_a_transient_error_that_names_it() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    producer = Producer(nobody, "t", delivery_secs=0.2)
    receipt = producer.send(b"x")
    with pytest.raises(GatewayUnreachableError, match=f"no gateway answers at {nobody}"):
        producer.flush()
    with pytest.raises(GatewayUnreachableError, match="may or may not be stored"):
        receipt.result(0)
    producer.flush()  # a failure is raised once
    producer.close()


def test_answers_become_the_errors_they_stand_for(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    producing = create_token(file, "p", ["produce"])
    with running(tmp_path / "data", tokens_file=str(file), max_tables="1") as gateway:
        with (
            GatewayClient(gateway.url) as client,
            pytest.raises(UnauthorizedError, match="needs a token"),
        ):
            client.tables()
        with (
            GatewayClient(gateway.url, producing) as client,
            pytest.raises(ForbiddenError, match="lacks the read role") as refused,
        ):
            client.stats()
        assert refused.value.code == "FORBIDDEN"
        with Producer(gateway.url, "t", token=producing) as producer:
            producer.send(b"x")
        other = Producer(gateway.url, "other", token=producing)
        other.send(b"x")
        other.send(b"y")
        with pytest.raises(PayloadTooLargeError, match="events 1 to 2: table 'other' would be"):
            other.close()


def test_calls_give_typed_answers(gateway: Gateway, client: GatewayClient) -> None:
    with Producer(gateway.url, "typed") as producer:
        producer.send(b"12345678", partition=3)
    [info] = [info for info in client.tables() if info.table == "typed"]
    assert (info.partitions, info.events) == (1, 1)
    assert info.bytes >= 8
    assert info.oldest_unflushed_secs is not None
    assert client.watermarks("typed")[3].high_watermark == 1
    assert client.health().ready
    assert client.stats()["writes"]["total"] >= 1
    with pytest.raises(NotFoundError, match="no events") as missing:
        client.read("missing")
    assert missing.value.code == "TABLE_NOT_FOUND"
    with pytest.raises(InvalidRequestError, match="invalid table name"):
        client.read("a b")
    with pytest.raises(NotFoundError):
        client.read("a/b")


def payloads(events: Iterator[Event] | list[Event]) -> list[str | None]:
    return [event.payload for event in events]


def test_a_tail_goes_on_where_it_was(gateway: Gateway, client: GatewayClient) -> None:
    with Producer(gateway.url, "tail") as producer:
        for number in range(20):
            producer.send(f"{number}", partition=number % 2, timestamp_ms=number)
        producer.flush()
        tail, odd = Tail(client, "tail"), Tail(client, "tail", partition=1)
        assert payloads(tail.last(3)) == ["17", "18", "19"]
        assert payloads(odd.last(2)) == ["17", "19"]
        assert payloads(tail.new()) == []
        producer.send("20", partition=1)
        producer.send("21", partition=5)
        producer.flush()
        assert payloads(tail.new()) == ["20", "21"]
        assert payloads(odd.new()) == ["20"]
        even, odds = [str(n) for n in range(0, 20, 2)], [str(n) for n in range(1, 20, 2)]
        assert payloads(Tail(client, "tail").new()) == [*even, *odds, "20", "21"]
    assert tail.missed == 0


def test_the_readmes_producer_works(gateway: Gateway, client: GatewayClient) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(example.replace("http://127.0.0.1:8080", gateway.url), {})
    assert [event.payload for event in client.read("orders").records] == ['{"id": 1}', '{"id": 2}']
