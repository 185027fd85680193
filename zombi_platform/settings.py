"""Every ZOMBI_ variable: typed, frozen, documented in one place.

Entry points call `Settings.from_env` once and pass the value down; nothing else reads the
environment. A value that cannot work raises `SettingsError` with the variable, the value
and what is allowed. docs/configuration.md and .env.example are printed from this module.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from zombi_platform.errors import SettingsError

PREFIX = "ZOMBI_"

Durability = Literal["fsync", "wal", "none"]


def setting(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A documented field; `low` and `high` bound numbers."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


def secret(doc: str) -> Any:
    """A field whose value is never shown."""
    return field(default=None, repr=False, metadata={"doc": doc, "secret": True})


@dataclass(frozen=True, slots=True)
class Settings:
    # Core
    data_dir: Path = setting(Path("./data"), "Directory of the hot buffer.")
    host: str = setting(
        "127.0.0.1", "Address to listen on. Beyond loopback only with tokens configured."
    )
    port: int = setting(8080, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    url: str = setting(
        "http://127.0.0.1:8080", "Where the command line and other processes find the gateway."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe log messages shown."
    )

    # Access
    tokens_file: Path | None = setting(
        None, "File of token hashes, made by `zombi token`; reread when it changes."
    )
    token: str | None = secret("Bearer token the command line and the client send.")
    allow_anonymous: bool = setting(
        False, "Serve without tokens on any address. Everyone who reaches the port may do all."
    )
    oauth_token_secs: int = setting(
        3600, "Lifetime of an access token given for client credentials.", low=60, high=86400
    )

    # Durability and the hot buffer
    durability: Durability = setting(
        "fsync",
        "What an ack means: `fsync` on disk, `wal` in the operating system, `none` in memory.",
    )
    rocksdb_wal_enabled: bool = setting(True, "`false` is the same as `ZOMBI_DURABILITY=none`.")
    idempotency_window_secs: int = setting(
        86400, "How long an idempotency key is remembered.", low=1, high=31_536_000
    )
    max_hot_bytes_mb: int = setting(
        8192, "Hot buffer size past which writes get 503 `BUFFER_FULL`.", low=1
    )
    max_tables: int = setting(1000, "Most tables in the hot buffer.", low=1, high=100_000)
    max_partitions: int = setting(
        4096, "Most distinct partitions, over all tables.", low=1, high=1_000_000
    )
    rocksdb_write_buffer_mb: int = setting(64, "RocksDB memtable size.", low=1, high=4096)
    rocksdb_max_write_buffers: int = setting(3, "RocksDB memtables at most.", low=2, high=64)
    rocksdb_l0_compaction_trigger: int = setting(
        16, "RocksDB level-0 files that start a compaction.", low=2, high=100
    )
    rocksdb_target_file_size_mb: int = setting(64, "RocksDB file size.", low=1, high=4096)
    rocksdb_block_cache_mb: int = setting(128, "RocksDB block cache.", low=1, high=65536)
    rocksdb_block_size_kb: int = setting(16, "RocksDB block size.", low=1, high=4096)

    # Limits of the gateway
    max_inflight_writes: int = setting(
        10_000, "Write requests in flight past which writes get 503.", low=1
    )
    max_inflight_bytes_mb: int = setting(
        64, "Bytes of write requests in flight past which writes get 503.", low=1
    )
    max_body_mb: int = setting(
        16, "Largest request body, also after decompression.", low=1, high=1024
    )
    max_bulk_records: int = setting(
        100_000, "Most records in one bulk request.", low=1, high=10_000_000
    )
    max_connections: int = setting(
        20_000, "Open connections past which new ones are refused with 503.", low=1
    )
    max_concurrent_reads: int = setting(
        8, "Reads of the hot buffer served at once; more wait their turn.", low=1, high=1024
    )
    max_open_reads: int = setting(
        32, "Reads whose answer is not sent whole yet; more get 503.", low=1, high=10_000
    )
    request_timeout_secs: float = setting(
        30.0, "Seconds in which a request must have arrived whole.", low=0.1, high=3600
    )
    idle_timeout_secs: float = setting(
        60.0,
        "Seconds after which a connection without a request, or with an unread answer, is closed.",
        low=0.1,
        high=3600,
    )
    shutdown_grace_secs: int = setting(
        10, "Seconds that requests in flight get to finish on SIGTERM.", low=1, high=3600
    )
    fast_lane: bool = setting(
        True, "Serve the two write routes ahead of FastAPI. Answers are the same either way."
    )

    failpoints: str | None = setting(
        None, "Only for tests: places at which a process dies, freezes or fails."
    )

    # From hot to Iceberg
    flush_interval_secs: int = setting(
        60, "Age of the oldest event that is not in Iceberg at which a flush is due.", low=1
    )
    target_file_size_mb: int = setting(
        128, "Most hot bytes that become one Parquet file; as many also make a flush due.", low=1
    )
    flush_max_segment: int = setting(
        1_000_000, "Most events that become one Parquet file.", low=1, high=10_000_000
    )
    snapshot_threshold_files: int = setting(
        10, "Staged files at which they are committed as a snapshot.", low=1
    )
    snapshot_threshold_gb: float = setting(
        1.0, "Staged gigabytes at which they are committed as a snapshot.", low=0.0
    )
    snapshot_max_age_secs: int = setting(
        60, "Age of the oldest event at which staged files are committed as a snapshot.", low=1
    )
    merge_files_at: int = setting(
        10,
        "Small files of one hour and partition that a flush merges into one; 0 for never.",
        low=0,
        high=1000,
    )
    snapshots_kept: int = setting(
        100,
        "Snapshots a table keeps; commits expire older ones, a tenth at a time.",
        low=2,
        high=10_000,
    )
    hot_retention_secs: int = setting(
        0, "Seconds that committed events stay in the hot buffer.", low=0
    )
    delete_grace_secs: int = setting(
        3600, "Seconds between the tombstone of a file in the lake and its deletion.", low=0
    )
    lease_secs: int = setting(
        60, "Seconds after which a table's lease ends unless its worker renews it.", low=1
    )
    pipeline_silence_secs: int = setting(
        120, "Seconds without a call from a pipeline after which the gateway says so.", low=1
    )
    tables_file: Path | None = setting(
        None, "TOML file with thresholds of single tables; reread when it changes."
    )

    # Engines
    engine: Literal["spark", "arrow"] | None = setting(
        None, "What writes Parquet; without it Spark where Java is found, else Arrow."
    )
    spark_remote: str | None = setting(
        None, "Spark Connect server, `sc://host:port`; without it the one on this machine."
    )
    spark_port: int = setting(
        15002, "Port of the Spark Connect server on this machine.", low=1, high=65535
    )
    spark_master: str = setting("local[*,3]", "Master of the Spark server on this machine.")
    spark_memory: str = setting("1g", "Heap of the Spark server on this machine.")
    stage_concurrency: int = setting(
        1, "Splits that the Arrow engine stages at once.", low=1, high=64
    )

    # Dagster
    dagster_port: int = setting(
        3000, "Port of the Dagster UI, on loopback; 0 picks a free one.", low=0, high=65535
    )
    dagster_runs_kept: int = setting(
        2000, "Finished Dagster runs that are kept; older ones are deleted.", low=10
    )

    # Lake
    warehouse: str | None = setting(
        None, "Where tables live; else `s3://bucket/path`, else `warehouse` in the data directory."
    )
    s3_bucket: str | None = setting(None, "Bucket of the lake; without it a local directory.")
    storage_path: str = setting("tables", "Path of the lake in the bucket.")
    s3_endpoint: str | None = setting(None, "S3 endpoint that is not AWS.")
    s3_region: str = setting("us-east-1", "Region of the bucket.")
    s3_max_retries: int = setting(
        5, "Further tries of a request that the object store did not answer.", low=0, high=100
    )
    s3_retry_initial_ms: int = setting(100, "First wait between such tries.", low=1)
    s3_retry_max_ms: int = setting(10_000, "Longest wait between such tries.", low=1)
    s3_timeout_secs: float = setting(
        20.0,
        "Most seconds for one such try, and for all of them before the last begins.",
        low=0.1,
        high=600,
    )
    max_concurrent_s3_uploads: int = setting(
        4, "Files that one task uploads at once.", low=1, high=256
    )
    catalog: Literal["filesystem", "sql", "rest", "glue", "hive"] = setting(
        "filesystem", "Catalog that commits are made in."
    )
    catalog_uri: str | None = setting(None, "Address of a `sql`, `rest` or `hive` catalog.")
    catalog_namespace: str = setting("zombi", "Namespace of the tables.")
    catalog_url: str | None = setting(
        None, "External REST catalog in which every table is registered and kept up to date."
    )
    catalog_warehouse: str | None = setting(None, "Warehouse to name to a REST catalog.")
    catalog_token: str | None = secret("Bearer token for the REST catalog.")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Parse what is set; every problem is named, not only the first."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for spec in fields(cls):
            text = environ.get(variable(spec))
            if text is None or text == "":
                continue
            try:
                values[spec.name] = _parse(spec, text)
            except ValueError as error:
                shown = "(hidden)" if spec.metadata.get("secret") else repr(text)
                problems.append(f"{variable(spec)}={shown}: {error}")
        if problems:
            raise SettingsError("; ".join(problems))
        settings = cls(**values)
        if not settings.rocksdb_wal_enabled:
            if environ.get("ZOMBI_DURABILITY", "none") != "none":
                raise SettingsError(
                    "ZOMBI_ROCKSDB_WAL_ENABLED=false contradicts ZOMBI_DURABILITY="
                    f"{settings.durability}: set only one of them"
                )
            object.__setattr__(settings, "durability", "none")
        return settings


NEEDLESS: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "ZOMBI_WRITE_COMBINER_ENABLED",
            "ZOMBI_WRITE_COMBINER_SIZE",
            "ZOMBI_WRITE_COMBINER_WINDOW_US",
            "ZOMBI_WRITE_COMBINER_QUEUE_CAPACITY",
            "ZOMBI_WRITE_COMBINER_SHARDS",
            "ZOMBI_WRITE_COMBINER_QUEUE_BYTES_MB",
        ],
        "every write is group-committed",
    ),
    "ZOMBI_TIMESTAMP_INDEX_ENABLED": "blocks carry their time range, so reads skip without one",
    "ZOMBI_FLUSH_BATCH_SIZE": "a flush takes everything there is",
    "ZOMBI_ICEBERG_ENABLED": "there is no other output",
    "ZOMBI_REDIS_URL": "gateways share nothing",
    "ZOMBI_NODE_ID": "gateways share nothing",
}
"""Variables of other Zombi versions that this design has no use for, and why."""


def variable(spec: Field[Any]) -> str:
    """The environment variable of a field."""
    return PREFIX + spec.name.upper()


def remarks(environ: Mapping[str, str]) -> list[str]:
    """One line for each ZOMBI_ variable that has no effect, with the nearest known name."""
    known = {variable(spec) for spec in fields(Settings)}
    lines = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        if name in NEEDLESS:
            lines.append(f"{name} is needless here: {NEEDLESS[name]}")
            continue
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        lines.append(f"{name} is not a setting and has no effect{hint}")
    return lines


def _parse(spec: Field[Any], text: str) -> Any:
    kind = typing.get_type_hints(Settings)[spec.name]
    # `X | None` is one of two types, depending on what X is.
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(arm for arm in typing.get_args(kind) if arm is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text.lower()
    if kind is bool:
        return _parse_bool(text)
    if kind in (int, float):
        return _parse_number(kind, text, spec.metadata["low"], spec.metadata["high"])
    return kind(text)


def _parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _parse_number(
    kind: type[int] | type[float], text: str, low: float | None, high: float | None
) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise ValueError(f"must be {noun}") from None
    if not (low is None or number >= low) or not (high is None or number <= high):
        bounds = " and ".join(
            f"at {word} {bound:g}"
            for word, bound in (("least", low), ("most", high))
            if bound is not None
        )
        raise ValueError(f"must be {bounds}")
    return number


def render_table() -> str:
    """The settings as a Markdown table, in the order of their definition."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for spec in fields(Settings):
        default = "" if spec.default is None else f"`{_show(spec.default)}`"
        rows.append(f"| `{variable(spec)}` | {default} | {spec.metadata['doc']} |")
    return "\n".join(rows) + "\n"


def render_env_example() -> str:
    """The settings as an env file in which everything is commented out."""
    lines = ["# Every setting with its default. Uncomment what you change."]
    for spec in fields(Settings):
        default = "" if spec.default is None else _show(spec.default)
        lines += ["", f"# {spec.metadata['doc']}", f"#{variable(spec)}={default}"]
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
