"""Producers in processes of their own, for stress; apart, so that they start quickly."""

from __future__ import annotations

import http.client
import json
import time
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event

PARTITIONS = 4
HOUR_MS = 3_600_000


def write(
    port: int,
    table: str,
    number: int,
    bulk: int,
    acked: SynchronizedArray[int],
    stopping: Event,
) -> None:
    """Send bulks of one partition after the other until told to stop; every send is acked."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    turn = number
    while not stopping.is_set():
        partition, turn = turn % PARTITIONS, turn + 1
        late_ms = turn % 3 * HOUR_MS
        stamp = int(time.time() * 1000) - late_ms
        record = {"payload": "x" * 100, "partition": partition, "timestamp_ms": stamp}
        body = json.dumps({"records": [record] * bulk})
        connection.request("POST", f"/tables/{table}/bulk", body, headers)
        response = connection.getresponse()
        data = response.read()
        if response.status == 503:
            continue
        assert response.status == 202, data
        last = json.loads(data)["offsets"][-1]
        with acked.get_lock():
            acked[partition] = max(acked[partition], last)
    connection.close()
