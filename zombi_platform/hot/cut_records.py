"""Cuts as they are stored: one record for what a cut takes, one for each split's files.

A cut may have a hundred thousand files, so its own record does not hold them: reporting a
split writes that split's record, and listing streams them. Nothing here changes a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import msgspec

from zombi_platform.cuts import Cut, StagedFile
from zombi_platform.hot import keys
from zombi_platform.hot.store import Batch, Store, View

Source = Store | View


def put_cut(batch: Batch, cut: Cut) -> None:
    stored = replace(cut, files=(), staged_splits=())
    batch.put(keys.cut_key(cut.table, cut.id), msgspec.msgpack.encode(stored))


def put_files(batch: Batch, cut: Cut, split: int, files: Sequence[StagedFile]) -> None:
    batch.put(keys.cut_files_key(cut.table, cut.id, split), msgspec.msgpack.encode(files))


def drop_cut(batch: Batch, table: str, cut: int) -> None:
    batch.delete(keys.cut_key(table, cut))
    prefix = keys.cut_files_prefix(table, cut)
    batch.delete_range(prefix, prefix + keys.AFTER)


def read_cuts(source: Source, table: str | None = None) -> Iterator[Cut]:
    """The cuts of a table, or of all, oldest first, without their files."""
    prefix = keys.CUTS if table is None else b"%s%s:" % (keys.CUTS, table.encode())
    for _, value in source.items(prefix):
        yield msgspec.msgpack.decode(value, type=Cut)


def cut_ids(source: Source, table: str) -> Iterator[int]:
    """The ids of a table's cuts, oldest first."""
    for key, _ in source.items(b"%s%s:" % (keys.CUTS, table.encode())):
        yield keys.parse_cut(key, keys.CUTS)[1]


def read_cut(source: Source, table: str, cut: int) -> Cut | None:
    """One cut, without its files."""
    for _, value in source.items(keys.cut_key(table, cut)):
        return msgspec.msgpack.decode(value, type=Cut)
    return None


def read_files(source: Source, table: str, cut: int) -> Iterator[tuple[int, list[StagedFile]]]:
    """The files of each split that was reported, in order of the splits."""
    for key, value in source.items(keys.cut_files_prefix(table, cut)):
        yield int(key[-8:], 16), msgspec.msgpack.decode(value, type=list[StagedFile])


def read_split_files(store: Store, table: str, cut: int, split: int) -> list[StagedFile] | None:
    value = store.get(keys.cut_files_key(table, cut, split))
    return None if value is None else msgspec.msgpack.decode(value, type=list[StagedFile])


def cut_json(source: Source, cut: Cut) -> Iterator[bytes]:
    """The cut with its files as JSON, in pieces of one split."""
    values = {field.name: getattr(cut, field.name) for field in fields(cut)}
    del values["files"], values["staged_splits"]
    yield msgspec.json.encode(values)[:-1] + b',"files":['
    staged: list[int] = []
    separator = b""
    for split, files in read_files(source, cut.table, cut.id):
        staged.append(split)
        if files:
            yield separator + msgspec.json.encode(files)[1:-1]
            separator = b","
    yield b'],"staged_splits":' + msgspec.json.encode(staged) + b"}"
