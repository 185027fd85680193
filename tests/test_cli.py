"""The commands against a real gateway: send, tail, tables, doctor."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from tests.gateway import ZOMBI, Gateway, running
from zombi_platform.cli import main
from zombi_platform.client import GatewayClient
from zombi_platform.gateway.tokens import create_token


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("data")) as gateway:
        yield gateway


def environ(url: str, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ZOMBI_", "AWS_"))}
    return kept | {"ZOMBI_URL": url, "COLUMNS": "200"} | more


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def zombi(url: str, *args: str | Path, input: str = "", **more: str) -> Result:
    """Run a command in this process: starting one for each would take most of the time."""
    stdin = io.TextIOWrapper(io.BytesIO(input.encode()))
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as place:
        place.setattr(os, "environ", environ(url, **more))
        place.setattr(sys, "argv", ["zombi", *map(str, args)])
        place.setattr(sys, "stdin", stdin)
        place.setattr(sys, "stdout", stdout)
        place.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as ended:
            main()
    return Result(int(ended.value.code or 0), stdout.getvalue(), stderr.getvalue())


def payloads(url: str, table: str) -> list[tuple[int, str | None]]:
    """Partition and payload of everything, by partition and sequence."""
    with GatewayClient(url) as client:
        events = client.read(table, limit=10_000).records
    events.sort(key=lambda event: (event.partition, event.sequence))
    return [(event.partition, event.payload) for event in events]


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# send


def test_send_reads_records_from_a_file(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "events.ndjson"
    first = {"payload": "a", "partition": 3, "timestamp_ms": 5, "headers": {"h": "v"}}
    second = {"payload_base64": "/wA=", "idempotency_key": "k"}
    file.write_text(f"{json.dumps(first)}\n\n{json.dumps(second)}\n")
    done = zombi(gateway.url, "send", "records", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["table"], summary["events"], summary["bytes_read"]) == ("records", 2, 3)
    with GatewayClient(gateway.url) as client:
        b, a = client.read("records", partition=0).records, client.read("records", partition=3)
    assert (b[0].data, b[0].idempotency_key) == (b"\xff\x00", "k")
    assert (a.records[0].timestamp_ms, a.records[0].headers) == (5, {"h": "v"})


def test_send_takes_lines_as_payloads_from_standard_input(gateway: Gateway) -> None:
    # The second line would be a record; the first one decides.
    done = zombi(gateway.url, "send", "lines", "-", input='hello\n{"payload": "x"}\r\nno end')
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 events stored in lines, ")
    expected = [(0, "hello"), (0, '{"payload": "x"}'), (0, "no end")]
    assert payloads(gateway.url, "lines") == expected


def test_send_reads_gzip_and_names_a_broken_file(gateway: Gateway, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gz", tmp_path / "cut.gz"
    whole.write_bytes(gzip.compress(b"a\nb\n"))
    cut.write_bytes(whole.read_bytes()[:-9])
    assert zombi(gateway.url, "send", "packed", whole).returncode == 0
    assert payloads(gateway.url, "packed") == [(0, "a"), (0, "b")]
    for file in (cut, tmp_path / "missing.txt"):
        done = zombi(gateway.url, "send", "packed", file)
        assert done.returncode == 1
        assert f"zombi: cannot read {file}: " in done.stderr


def test_sending_a_file_twice_with_a_key_prefix_adds_nothing(
    gateway: Gateway, tmp_path: Path
) -> None:
    file = tmp_path / "log.txt"
    file.write_text("".join(f"line {n}\n" for n in range(100)))
    command = ["send", "twice", str(file), "--key-prefix", "run-1", "--partitions", "4"]
    for extra in ([], ["--batch", "7"]):
        done = zombi(gateway.url, *command, *extra)
        assert done.stdout.startswith("100 events stored")
    found = payloads(gateway.url, "twice")
    assert sorted(payload or "" for _, payload in found) == sorted(file.read_text().splitlines())
    assert {partition for partition, _ in found} == {0, 1, 2, 3}
    assert zombi(gateway.url, "send", "twice", file).returncode == 0
    assert len(payloads(gateway.url, "twice")) == 200


def test_send_spreads_by_key_field_or_in_turn(gateway: Gateway) -> None:
    lines = "".join(f'{{"id": "u{n % 10}", "n": {n}}}\n' for n in range(30))
    command = ["send", "keyed", "--key-field", "id", "--partitions", "3"]
    assert zombi(gateway.url, *command, input=lines).stdout.startswith("30 events stored")
    ids = [json.loads(payload or "")["id"] for _, payload in payloads(gateway.url, "keyed")]
    assert sorted(ids) == sorted(f"u{n}" for n in range(10)), "a key gives one event"
    zombi(gateway.url, "send", "turns", "--partitions", "2", input="a\nb\nc\n")
    assert payloads(gateway.url, "turns") == [(0, "a"), (0, "c"), (1, "b")]
    zombi(gateway.url, "send", "one", "--partition", "9", input="a\n")
    assert payloads(gateway.url, "one") == [(9, "a")]


@pytest.mark.parametrize(
    ("args", "lines", "reason"),
    [
        ([], '{"payload": "a"}\n{"pay": 1}\n', "line 2: it is not a record: Object contains"),
        (["--format", "records"], '{"partition": 1}\n', "line 1: give either payload or"),
        (["--key-field", "id"], '{"id": 1}\n{"id": null}\n', "line 2: --key-field id: the"),
        (["--key-field", "id"], "no json\n", "line 1: --key-field id needs a JSON object"),
        ([], '{"payload": "a", "partition": -1}\n', "partition -1 is out of range"),
        ([], '{"payload": "a", "timestamp_ms": -1}\n', "event 1: timestamp_ms -1 is out of"),
        (["--partition", "1", "--partitions", "2"], "a\n", "--partition and --partitions contra"),
    ],
)
def test_send_names_what_is_wrong(
    gateway: Gateway, args: list[str], lines: str, reason: str
) -> None:
    done = zombi(gateway.url, "send", "wrong", *args, input=lines)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"zombi: {reason}")


def test_send_shows_its_progress_on_a_terminal(gateway: Gateway) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [ZOMBI, "send", "shown"],
        env=environ(gateway.url, TERM="xterm"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    assert process.stdin is not None
    shown = b""
    while b" events, " not in shown:
        process.stdin.write(b"line\n")
        process.stdin.flush()
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
    process.stdin.close()
    while select.select([ours], [], [], 10)[0]:
        try:
            shown = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    os.close(ours)


# tail


def test_tail_shows_the_last_events_one_a_line(gateway: Gateway) -> None:
    lines = [f'{{"payload": "{n}", "partition": {n % 2}, "timestamp_ms": {n}}}' for n in range(9)]
    lines.append('{"payload": "two\\nlines \\u001b[31m", "timestamp_ms": 9}')
    lines.append('{"payload_base64": "/wA=", "timestamp_ms": 10}')
    zombi(gateway.url, "send", "tailed", input="\n".join(lines))
    done = zombi(gateway.url, "tail", "tailed", "-n", "3")
    assert done.stdout.splitlines() == [
        "1970-01-01T00:00:00.008Z 0/5 8",
        "1970-01-01T00:00:00.009Z 0/6 two\\nlines \\x1b[31m",
        "1970-01-01T00:00:00.010Z 0/7 b'\\xff\\x00'",
    ]
    done = zombi(gateway.url, "tail", "tailed", "--partition", "1", "--json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["payload"], r["sequence"]) for r in records] == [
        ("1", 1),
        ("3", 2),
        ("5", 3),
        ("7", 4),
    ]
    copied = zombi(gateway.url, "send", "copied", input=done.stdout)
    assert copied.stdout.startswith("4 events stored")
    assert payloads(gateway.url, "copied") == [(1, "1"), (1, "3"), (1, "5"), (1, "7")]
    done = zombi(gateway.url, "tail", "missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert "table 'missing' has no events" in done.stderr


def test_tail_follows_through_a_restart_of_the_gateway(tmp_path: Path) -> None:
    port = unused_url().rsplit(":", 1)[1]
    with running(tmp_path, port=port) as gateway:
        process = subprocess.Popen(
            [ZOMBI, "tail", "t", "-f"],
            env=environ(gateway.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "has no events" in process.stderr.readline()
            zombi(gateway.url, "send", "t", input="before\n")
            assert process.stdout.readline().endswith(" 0/1 before\n")
            gateway.kill()
            assert "waiting for it" in process.stderr.readline()
            with running(tmp_path, port=port):
                assert "the gateway is back" in process.stderr.readline()
                zombi(gateway.url, "send", "t", input="after\n")
                assert process.stdout.readline().endswith(" 0/2 after\n")
        finally:
            process.terminate()
            process.communicate()


# tables


def test_tables_lists_what_the_hot_buffer_holds(gateway: Gateway) -> None:
    zombi(gateway.url, "send", "listed", "--partitions", "2", input="a\nb\nc\n")
    shown = zombi(gateway.url, "tables").stdout
    [row] = [line for line in shown.splitlines() if " listed " in line]
    assert [cell.strip() for cell in row.split("│")][1:4] == ["listed", "2", "3"]
    tables = json.loads(zombi(gateway.url, "tables", "--json").stdout)["tables"]
    [info] = [table for table in tables if table["table"] == "listed"]
    assert (info["partitions"], info["events"]) == (2, 3)


@pytest.mark.parametrize("command", [["tables"], ["tail", "t", "-f"], ["send", "t"]])
def test_without_a_gateway_the_error_is_one_line(command: list[str]) -> None:
    url = unused_url()
    done = subprocess.run(
        [ZOMBI, *command],
        env=environ(url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"zombi: no gateway answers at {url}: ")
    assert done.stderr.count("\n") == 1


# doctor


def doctor(url: str, data_dir: Path, **more: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the findings by name."""
    port = url.rsplit(":", 1)[1]
    settings = {"ZOMBI_DATA_DIR": str(data_dir), "ZOMBI_PORT": port, "ZOMBI_MAX_CONNECTIONS": "9"}
    done = zombi(url, "doctor", "--json", **settings | more)
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {check["name"]: check for check in checks}


def test_doctor_finds_a_running_platform_well(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        code, found = doctor(gateway.url, tmp_path)
        assert code == 0
        named = ["data directory", "hot buffer", "open files", "tokens", "port", "gateway"]
        assert [found[name]["status"] for name in named] == ["ok"] * 6
        assert "is in use, and a gateway answers" in found["hot buffer"]["found"]
        # The same directory, seen by someone who looks for the gateway elsewhere.
        code, found = doctor(unused_url(), tmp_path)
        assert (code, found["hot buffer"]["status"], found["gateway"]["status"]) == (
            0,
            "warn",
            "warn",
        )
        assert "zombi gateway" in found["gateway"]["todo"]
        # And the port, by someone who wants it for another gateway.
        code, found = doctor(unused_url(), tmp_path / "other", ZOMBI_PORT=str(gateway.port))
        assert (code, found["port"]["status"]) == (1, "fail")
        shown = zombi(gateway.url, "doctor", ZOMBI_DATA_DIR=str(tmp_path), ZOMBI_PORT="0").stdout
        assert "ok   gateway: answers at" in shown
        assert shown.splitlines()[-1].startswith("0 failed, ")


def test_doctor_says_what_cannot_work_and_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    bad_tokens = tmp_path / "tokens.json"
    bad_tokens.write_text("{}x")
    code, found = doctor(
        unused_url(),
        file / "data",
        ZOMBI_TOKENS_FILE=str(bad_tokens),
        ZOMBI_ENGINE="spark",
        JAVA_HOME=str(tmp_path),
        ZOMBI_MAX_CONNECTIONS="1000000000",
        ZOMBI_MAX_HOT_BYTES_MB="1000000000",
        ZOMBI_MAX_BODIES="1",
    )
    assert code == 1
    statuses = {name: check["status"] for name, check in found.items()}
    assert statuses == {
        "Python": "ok",
        "Java": "fail",
        "settings": "warn",
        "data directory": "fail",
        "hot buffer": "fail",
        "disk": "warn",
        "open files": "warn",
        "tokens": "fail",
        "port": "ok",
        "gateway": "warn",
    }
    assert all(check["todo"] for name, check in found.items() if statuses[name] != "ok")
    code, found = doctor(unused_url(), tmp_path, ZOMBI_HOST="0.0.0.0", ZOMBI_DURABILITY="maybe")
    assert (code, found["settings"]["status"]) == (1, "fail")
    assert "ZOMBI_DURABILITY='maybe'" in found["settings"]["found"]
    code, found = doctor(unused_url(), tmp_path, ZOMBI_HOST="0.0.0.0")
    assert (code, found["tokens"]["status"]) == (1, "fail")


def test_doctor_tells_a_missing_token_and_a_stranger_apart(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    token = create_token(file, "p", ["produce"])
    with running(tmp_path / "data", tokens_file=str(file)) as gateway:
        code, found = doctor(gateway.url, tmp_path / "data", ZOMBI_TOKENS_FILE=str(file))
        assert (code, found["gateway"]["status"], found["tokens"]["status"]) == (0, "warn", "ok")
        assert "ZOMBI_TOKEN" in found["gateway"]["todo"]
        code, found = doctor(gateway.url, tmp_path / "data", ZOMBI_TOKEN=token)
        assert (code, found["gateway"]["status"]) == (0, "ok")


def test_doctor_looks_for_the_bucket(tmp_path: Path) -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        s3 = {"ZOMBI_S3_BUCKET": "lake", "ZOMBI_S3_ENDPOINT": endpoint} | keys
        code, found = doctor(unused_url(), tmp_path, **s3)
        assert (code, found["object store"]["todo"]) == (1, "create the bucket")
        import boto3

        boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ).create_bucket(Bucket="lake")
        code, found = doctor(unused_url(), tmp_path, **s3)
        assert (code, found["object store"]["status"]) == (0, "ok")
        # A stranger where the gateway should be.
        code, found = doctor(endpoint, tmp_path, ZOMBI_PORT="0")
        assert (code, found["gateway"]["status"]) == (1, "fail")
    finally:
        server.stop()
    code, found = doctor(unused_url(), tmp_path, **s3)
    assert (code, found["object store"]["status"]) == (1, "fail")
    assert "ZOMBI_S3_ENDPOINT" in found["object store"]["todo"]


# starting


def test_no_command_imports_what_only_others_need() -> None:
    heavy = "{'pyarrow', 'httpx', 'rocksdict', 'fastapi', 'boto3', 'dagster', 'pyspark'}"
    code = f"import sys, zombi_platform.cli; print(*sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == []
