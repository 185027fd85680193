"""When a service answers. A probe asks once and says yes or no; who asks again is not its job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

Probe = Callable[[], Awaitable[bool]]

PROBE_SECS_MAX: Final = 5.0
_HEARTBEATS: Final = """{ instance { daemonHealth { allDaemonStatuses {
    required healthy lastHeartbeatTime } } } }"""


def http(host: str, port: int, path: str) -> Probe:
    """A GET that is answered with 200."""

    async def probe() -> bool:
        return (
            await _request(host, port, f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n") is not None
        )

    return probe


def tcp(host: str, port: int) -> Probe:
    async def probe() -> bool:
        return await _connects(asyncio.open_connection(host, port))

    return probe


def unix(path: Path) -> Probe:
    async def probe() -> bool:
        return await _connects(asyncio.open_unix_connection(path))

    return probe


def dagster_daemon(host: str, port: int) -> Probe:
    """The webserver at `port` has seen every needed daemon's heartbeat since the probe was made."""
    since = time.time()
    body = json.dumps({"query": _HEARTBEATS})
    request = (
        f"POST /graphql HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )

    async def probe() -> bool:
        answer = await _request(host, port, request)
        return answer is not None and _all_beat(json.loads(answer), since)

    return probe


def _all_beat(answer: dict[str, Any], since: float) -> bool:
    statuses = answer["data"]["instance"]["daemonHealth"]["allDaemonStatuses"]
    needed = [status for status in statuses if status["required"]]
    return bool(needed) and all(
        status["healthy"] and (status["lastHeartbeatTime"] or 0) >= since for status in needed
    )


async def _connects(opening: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> bool:
    try:
        _, writer = await asyncio.wait_for(opening, PROBE_SECS_MAX)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _request(host: str, port: int, request: str) -> bytes | None:
    """The body of an answer with status 200, else None."""
    try:
        async with asyncio.timeout(PROBE_SECS_MAX):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode())
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None
