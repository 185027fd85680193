"""Writes the manifests of a new snapshot and keeps their number small.

Appending one manifest per flush would make planning slower with every flush; rewriting all
of them each time would make commits slower. So manifests are merged like levels of a
log-structured tree: ten of one order of magnitude become one of the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pyiceberg.avro.codecs import AvroCompressionCodec
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table import Table

from zombi_platform.lake.schema import our_spec

MERGED_AT: Final = 10
MERGED_FILES_MAX: Final = 10_000
"""Data files past which a manifest is left alone."""
COMPRESSION: Final[AvroCompressionCodec] = "deflate"


@dataclass(frozen=True, slots=True)
class ManifestPlan:
    """The manifests of a new snapshot before any of them is written."""

    snapshot_id: int
    kept: tuple[ManifestFile, ...]
    merged: tuple[ManifestFile, ...]
    added_path: str
    merged_path: str
    list_path: str

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that `write` will write."""
        merged = (self.merged_path,) if self.merged else ()
        return (self.added_path, *merged, self.list_path)


def plan_manifests(
    table: Table, snapshot_id: int, name: str, holders: Sequence[ManifestFile] = ()
) -> ManifestPlan:
    """Decide which manifests of the current snapshot stay and which are merged.

    `holders` name files that the new snapshot takes out: those are the ones merged then.
    """
    metadata = table.metadata
    current = metadata.current_snapshot()
    live = [] if current is None else [m for m in current.manifests(table.io) if live_files(m)]
    merged = holders or choose_merge(live, our_spec(metadata).spec_id)
    directory = f"{metadata.location}/metadata"
    return ManifestPlan(
        snapshot_id=snapshot_id,
        kept=tuple(manifest for manifest in live if manifest not in merged),
        merged=tuple(merged),
        added_path=f"{directory}/{name}-m0.avro",
        merged_path=f"{directory}/{name}-m1.avro",
        list_path=f"{directory}/snap-{snapshot_id}-{name}.avro",
    )


def choose_merge(manifests: Sequence[ManifestFile], spec_id: int) -> list[ManifestFile]:
    """The manifests of the lowest level that is full, or none."""
    levels: dict[int, list[ManifestFile]] = defaultdict(list)
    for manifest in manifests:
        files = live_files(manifest)
        mergeable = (
            manifest.content == ManifestContent.DATA and manifest.partition_spec_id == spec_id
        )
        if mergeable and files < MERGED_FILES_MAX:
            levels[len(str(files))].append(manifest)
    for level in sorted(levels):
        if len(levels[level]) >= MERGED_AT:
            return levels[level][:MERGED_AT]
    return []


def write_manifests(
    plan: ManifestPlan, table: Table, added: Sequence[DataFile], removed: Collection[str] = ()
) -> None:
    """Write what the plan names; nothing refers to it yet."""
    metadata = table.metadata
    manifests = [_write_added(plan, table, added)]
    if plan.merged:
        manifests.append(_write_merged(plan, table, removed))
    with write_manifest_list(
        format_version=metadata.format_version,
        output_file=table.io.new_output(plan.list_path),
        snapshot_id=plan.snapshot_id,
        parent_snapshot_id=metadata.current_snapshot_id,
        sequence_number=metadata.next_sequence_number(),
        avro_compression=COMPRESSION,
    ) as writer:
        writer.add_manifests([*manifests, *plan.kept])


def _write_added(plan: ManifestPlan, table: Table, files: Sequence[DataFile]) -> ManifestFile:
    with _writer(plan, table, plan.added_path) as writer:
        for file in files:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=plan.snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
    return writer.to_manifest_file()


def _write_merged(plan: ManifestPlan, table: Table, removed: Collection[str]) -> ManifestFile:
    with _writer(plan, table, plan.merged_path) as writer:
        for manifest in plan.merged:
            for entry in manifest.fetch_manifest_entry(table.io):
                if entry.data_file.file_path in removed:
                    writer.delete(entry)
                else:
                    writer.existing(entry)
    return writer.to_manifest_file()


def _writer(plan: ManifestPlan, table: Table, path: str) -> ManifestWriter:
    metadata = table.metadata
    return write_manifest(
        metadata.format_version,
        our_spec(metadata),
        metadata.schema(),
        table.io.new_output(path),
        plan.snapshot_id,
        COMPRESSION,
    )


def live_files(manifest: ManifestFile) -> int:
    """How many files of the table it names."""
    # Writers of the first format version leave the counts out; such a manifest counts as one.
    added, existing = manifest.added_files_count, manifest.existing_files_count
    return 1 if added is None or existing is None else added + existing
