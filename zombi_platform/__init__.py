"""Zombi Platform: events in over HTTP, durable before the answer, readable from Iceberg."""

__version__ = "0.1.0"
