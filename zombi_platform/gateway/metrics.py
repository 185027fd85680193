"""Counters of the gateway, cheap enough for every request.

Plain integers are counted in the event loop and turned into Prometheus families only when
somebody scrapes. Labels are bounded: past a number of tables the rest share one label.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zombi_platform.hot.group_commit import Committed

TABLE_LABELS_MAX: Final = 200
OTHER_TABLES: Final = "(other)"
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
RATE_SECS: Final = 10.0


class Histogram:
    """Counts in fixed buckets."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, doc: str) -> HistogramMetricFamily:
        buckets, running = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return HistogramMetricFamily(name, doc, buckets=buckets, sum_value=self.total)


class Rate:
    """Events a second over the last interval that ended."""

    def __init__(self) -> None:
        self._since, self._count, self._rate = time.monotonic(), 0, 0.0

    def read(self, count: int) -> float:
        elapsed = time.monotonic() - self._since
        if elapsed >= RATE_SECS or self._rate == 0.0:
            self._rate = (count - self._count) / max(elapsed, 1e-3)
            self._since, self._count = time.monotonic(), count
        return self._rate


class Metrics(Collector):
    """All counters; `inflight_*` are kept by the write path."""

    def __init__(self, max_inflight_writes: int) -> None:
        self._max_inflight = max_inflight_writes
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.started = time.monotonic()
        self.writes = self.written_bytes = self.written_events = 0
        self.reads = self.read_records = self.errors = 0
        self.inflight_writes = self.inflight_bytes = 0
        self.write_seconds = Histogram(SECONDS)
        self.read_seconds = Histogram(SECONDS)
        self.group_events = Histogram(SIZES)
        self.store_seconds = Histogram(SECONDS)
        self.lake_load_seconds = Histogram(SECONDS)
        self.live_load_seconds = Histogram(SECONDS)
        self.live_staged_events = 0
        self._tables: dict[str, int] = {}
        self._write_rate, self._read_rate = Rate(), Rate()

    def committed(self, committed: Committed) -> None:
        self.written_events += committed.events
        self.group_events.observe(committed.events)
        self.store_seconds.observe(committed.write_secs)

    def wrote(self, table: str, events: int, size: int, seconds: float) -> None:
        self.writes += 1
        self.written_bytes += size
        self.write_seconds.observe(seconds)
        tables = self._tables
        if table not in tables:
            table = table if len(tables) < TABLE_LABELS_MAX else OTHER_TABLES
            tables.setdefault(table, 0)
        tables[table] += events

    def did_read(self, records: int, seconds: float) -> None:
        self.reads += 1
        self.read_records += records
        self.read_seconds.observe(seconds)

    def staged(self, events: int) -> None:
        """Hot events were written for the live view."""
        self.live_staged_events += events

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def stats(self) -> dict[str, object]:
        """What /stats shows."""
        uptime = time.monotonic() - self.started
        return {
            "uptime_secs": round(uptime, 3),
            "writes": {
                "total": self.writes,
                "events_total": self.written_events,
                "bytes_total": self.written_bytes,
                "rate_per_sec": round(self._write_rate.read(self.writes), 2),
                "avg_latency_us": round(_average_us(self.write_seconds, self.writes), 2),
            },
            "reads": {
                "total": self.reads,
                "records_total": self.read_records,
                "rate_per_sec": round(self._read_rate.read(self.reads), 2),
                "avg_latency_us": round(_average_us(self.read_seconds, self.reads), 2),
            },
            "errors_total": self.errors,
        }

    def collect(self) -> Iterator[Metric]:
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield gauge(
            "zombi_uptime_secs", "Server uptime in seconds", time.monotonic() - self.started
        )
        yield counter("zombi_writes", "Total write requests", self.writes)
        yield counter("zombi_writes_bytes", "Total bytes written", self.written_bytes)
        yield counter("zombi_events_written", "Total events written", self.written_events)
        yield gauge(
            "zombi_writes_rate_per_sec", "Current write rate", self._write_rate.read(self.writes)
        )
        yield gauge(
            "zombi_writes_avg_latency_us",
            "Average write latency",
            _average_us(self.write_seconds, self.writes),
        )
        yield counter("zombi_reads", "Total read requests", self.reads)
        yield counter("zombi_reads_records", "Total records read", self.read_records)
        yield gauge(
            "zombi_reads_rate_per_sec", "Current read rate", self._read_rate.read(self.reads)
        )
        yield gauge(
            "zombi_reads_avg_latency_us",
            "Average read latency",
            _average_us(self.read_seconds, self.reads),
        )
        yield counter("zombi_errors", "Total errors", self.errors)
        yield gauge("zombi_inflight_bytes", "Current inflight write bytes", self.inflight_bytes)
        yield gauge(
            "zombi_inflight_writes_available",
            "Available write permits",
            self._max_inflight - self.inflight_writes,
        )
        yield self.write_seconds.family("zombi_write_seconds", "Latency of write requests")
        yield self.read_seconds.family("zombi_read_seconds", "Latency of read requests")
        yield self.group_events.family("zombi_group_events", "Events in a group commit")
        yield self.store_seconds.family("zombi_store_seconds", "Time to make a group durable")
        yield self.lake_load_seconds.family(
            "zombi_lake_load_seconds", "Latency of table loads, committed events"
        )
        yield self.live_load_seconds.family(
            "zombi_live_load_seconds", "Latency of table loads, live events"
        )
        yield counter(
            "zombi_live_staged_events",
            "Hot events written as Parquet for the live view, merges included",
            self.live_staged_events,
        )
        events = counter("zombi_table_events", "Events written by table", labels=["table"])
        for table, count in self._tables.items():
            events.add_metric([table], count)
        yield events


def _average_us(histogram: Histogram, count: int) -> float:
    return histogram.total / count * 1e6 if count else 0.0
