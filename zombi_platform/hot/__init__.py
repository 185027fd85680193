"""The hot buffer: events on their way to Iceberg, durable in RocksDB before they are acked."""

from zombi_platform.hot.blocks import HeaderColumns, Segment
from zombi_platform.hot.buffer import HotBuffer
from zombi_platform.hot.group_commit import Append

__all__ = ["Append", "HeaderColumns", "HotBuffer", "Segment"]
