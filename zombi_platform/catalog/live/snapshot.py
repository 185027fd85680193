"""The synthetic snapshot: a table's committed files plus live blocks, as real Iceberg files.

The metadata is that of the committed table with one snapshot in place of all: readers must
not find an older one by time, and DuckDB overlooks snapshots younger than its own idea of
now, hence the minute back. Blocks hold several hours, so they are in an unpartitioned spec
of their own. Nothing refers to these files but answers of the live warehouse.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.avro.codecs import AvroCompressionCodec
from pyiceberg.io import FileIO, InputFile, OutputFile, OutputStream
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    read_manifest_list,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from zombi_platform.catalog.metadata import Sections, split
from zombi_platform.errors import CorruptionError
from zombi_platform.lake.schema import PROPERTIES, TABLE_SCHEMA

BACK_MS: Final = 60_000
COMPRESSION: Final[AvroCompressionCodec] = "null"

_statistics: Final = compute_statistics_plan(TABLE_SCHEMA, dict(PROPERTIES))
_field_ids: Final = parquet_path_to_id_mapping(TABLE_SCHEMA)


class _Snapshot(msgspec.Struct, rename="kebab"):
    snapshot_id: int
    manifest_list: str
    sequence_number: int = 0
    summary: dict[str, str] = {}


class _Spec(msgspec.Struct, rename="kebab"):
    spec_id: int
    fields: list[Any]


@dataclass(frozen=True, slots=True)
class Base:
    """The committed table that a live snapshot is built on."""

    sections: Sections
    schema: Schema
    snapshot: _Snapshot | None
    manifests: tuple[ManifestFile, ...]
    sequence_number: int
    spec: PartitionSpec
    """The unpartitioned spec for blocks; in `sections` it may be missing."""


def describe_block(location: str, content: pa.Buffer) -> DataFile:
    """A block as manifests list it, with bounds and counts of all columns."""
    footer = pq.read_metadata(pa.BufferReader(content))
    found = data_file_statistics_from_parquet_metadata(footer, _statistics, _field_ids)
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        file_size_in_bytes=content.size,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **found.to_serialized_dict(),
    )


def read_base(location: str, content: bytes, files: FileIO) -> Base:
    """The base from its metadata file; reads the manifest list of its current snapshot."""
    sections = split(content)
    if _decode(sections, "format-version", int) != 2:
        raise CorruptionError(f"{location} is not of format version 2")
    snapshot = _current(sections)
    manifests = (
        () if snapshot is None else read_manifest_list(files.new_input(snapshot.manifest_list))
    )
    return Base(
        sections=sections,
        schema=_schema(sections),
        snapshot=snapshot,
        manifests=tuple(manifests),
        sequence_number=_decode(sections, "last-sequence-number", int),
        spec=_unpartitioned(sections),
    )


def manifests_of(
    base: Base, blocks: Sequence[DataFile], snapshot_id: int, stem: str
) -> dict[str, bytes]:
    """A manifest of the blocks and the list of all manifests, by location; the list is last."""
    if not blocks:
        return {}
    manifest, listed = _InMemory(f"{stem}-m0.avro"), _InMemory(f"{stem}.avro")
    with write_manifest(2, base.spec, base.schema, manifest, snapshot_id, COMPRESSION) as writer:
        for block in blocks:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=block,
                )
            )
    with write_manifest_list(
        2, listed, snapshot_id, None, base.sequence_number + 1, COMPRESSION
    ) as list_writer:
        list_writer.add_manifests([*base.manifests, writer.to_manifest_file()])
    return {file.location: file.content for file in (manifest, listed)}


def metadata_of(
    base: Base,
    blocks: Sequence[DataFile],
    snapshot_id: int,
    manifest_list: str | None,
    directory: str,
) -> Mapping[str, Any]:
    """The metadata of the live table, ready to be printed."""
    now_ms = time.time_ns() // 1_000_000 - BACK_MS
    if manifest_list is None:
        assert base.snapshot is not None, "a table with no rows at all needs no live snapshot"
        manifest_list = base.snapshot.manifest_list
    number = base.sequence_number + 1 if blocks else base.sequence_number
    snapshot = {
        "snapshot-id": snapshot_id,
        "sequence-number": number,
        "timestamp-ms": now_ms,
        "manifest-list": manifest_list,
        "summary": _summary(base, blocks),
        "schema-id": base.schema.schema_id,
    }
    return {
        **base.sections,
        "partition-specs": _with_spec(base),
        "properties": _properties(base, directory),
        "last-sequence-number": number,
        "last-updated-ms": now_ms,
        "current-snapshot-id": snapshot_id,
        "snapshots": [snapshot],
        "snapshot-log": [{"snapshot-id": snapshot_id, "timestamp-ms": now_ms}],
        "metadata-log": [],
        "refs": {"main": {"snapshot-id": snapshot_id, "type": "branch"}},
        "statistics": [],
        "partition-statistics": [],
    }


def _properties(base: Base, directory: str) -> dict[str, str]:
    """Those of the table. Writers are refused, but only after they have written their files:
    these go where files nobody refers to are deleted."""
    properties: dict[str, str] = _decode(base.sections, "properties", dict[str, str] | None) or {}
    refused = f"{directory}/refused"
    return properties | {"write.data.path": refused, "write.metadata.path": refused}


def _summary(base: Base, blocks: Sequence[DataFile]) -> dict[str, str]:
    records = sum(block.record_count for block in blocks)
    size = sum(block.file_size_in_bytes for block in blocks)
    added = {"data-files": len(blocks), "records": records, "files-size": size}
    summary = {"operation": "append"}
    summary |= {f"added-{name}": str(count) for name, count in added.items()}
    before = {} if base.snapshot is None else base.snapshot.summary
    for name, count in added.items():
        total = f"total-{name}"
        if base.snapshot is None or total in before:
            summary[total] = str(int(before.get(total, "0")) + count)
    return summary


def _with_spec(base: Base) -> list[Any]:
    specs = msgspec.json.decode(base.sections["partition-specs"], type=list[_Spec])
    if all(spec.spec_id != base.spec.spec_id for spec in specs):
        specs.append(_Spec(base.spec.spec_id, []))
    return specs


def _unpartitioned(sections: Sections) -> PartitionSpec:
    specs = msgspec.json.decode(sections["partition-specs"], type=list[_Spec])
    for spec in specs:
        if not spec.fields:
            return PartitionSpec(spec_id=spec.spec_id)
    return PartitionSpec(spec_id=max(spec.spec_id for spec in specs) + 1)


def _current(sections: Sections) -> _Snapshot | None:
    wanted = _decode(sections, "current-snapshot-id", int | None)
    for raw in msgspec.json.decode(sections.get("snapshots", b"[]"), type=list[msgspec.Raw]):
        if msgspec.json.decode(raw, type=_Snapshot).snapshot_id == wanted:
            return msgspec.json.decode(raw, type=_Snapshot)
    return None


def _schema(sections: Sections) -> Schema:
    current = _decode(sections, "current-schema-id", int)
    for raw in msgspec.json.decode(sections["schemas"], type=list[msgspec.Raw]):
        schema = Schema.model_validate_json(bytes(raw))
        if schema.schema_id == current:
            return schema
    raise CorruptionError(f"the current schema {current} is not among the table's schemas")


def _decode(sections: Sections, name: str, kind: Any) -> Any:
    return msgspec.json.decode(sections.get(name, b"null"), type=kind)


class _InMemory(OutputFile):
    """A file that pyiceberg writes and this process stores afterwards."""

    content = b""

    def __len__(self) -> int:
        return len(self.content)

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> InputFile:
        raise NotImplementedError("it is not stored yet")

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Kept(self)


class _Kept(io.BytesIO):
    def __init__(self, file: _InMemory) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            self._file.content = self.getvalue()
        super().close()
