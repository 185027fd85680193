"""Commits by Iceberg REST clients, such as Spark's procedures.

Requirements and updates are applied by the platform's own catalog. What is certainly not
committed is refused with an error of the caller's kind, which clients take for final; a
conflict tells them to start over. Any other failure means that the outcome is not known, and
clients look it up. Properties and summaries named `zombi.…` are the fence of our own commits
(INV-10) and are refused from anyone else, as is what would make it another table: a new
place, which decides what a sweep may delete, or a new UUID.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, ValidationError
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssignUUIDUpdate,
    RemovePropertiesUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
)

from zombi_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ZombiError,
)
from zombi_platform.lake.lake import Lake

OURS: Final = "zombi."


class CommitUnknownError(ZombiError):
    """The commit may have happened: the client must look."""

    code = "COMMIT_STATE_UNKNOWN"


class _Request(BaseModel):
    requirements: tuple[TableRequirement, ...]
    updates: tuple[TableUpdate, ...]


def commit(lake: Lake, table: str, body: bytes) -> str:
    """Apply a `CommitTableRequest`; returns the location of the new metadata file."""
    request = _parse(body)
    _refuse_ours(request.updates)
    try:
        loaded = lake.catalog.load_table((lake.namespace, table))
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise NotFoundError(f"there is no table {table!r}", code="TABLE_NOT_FOUND") from error
    try:
        done = lake.catalog.commit_table(loaded, request.requirements, request.updates)
    except (CommitFailedException, NoSuchTableError) as error:
        raise ConflictError(str(error), code="COMMIT_FAILED") from error
    except (ValidationError, ValueError, KeyError, NotImplementedError) as error:
        raise InvalidRequestError(f"the updates cannot be applied: {error}") from error
    except Exception as error:
        raise CommitUnknownError(
            f"whether the commit to {table!r} happened is not known: {error}"
        ) from error
    return done.metadata_location


def _parse(body: bytes) -> _Request:
    try:
        return _Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"the commit does not fit: {where}: {first['msg']}") from error


def _refuse_ours(updates: Iterable[TableUpdate]) -> None:
    named: set[str] = set()
    for update in updates:
        if isinstance(update, SetLocationUpdate | AssignUUIDUpdate):
            raise ForbiddenError(
                f"{update.action} is refused: a table keeps its place and its UUID, by which the "
                "platform knows its files"
            )
        if isinstance(update, SetPropertiesUpdate):
            named.update(update.updates)
        elif isinstance(update, RemovePropertiesUpdate):
            named.update(update.removals)
        elif isinstance(update, AddSnapshotUpdate) and update.snapshot.summary is not None:
            named.update(update.snapshot.summary.model_dump())
    ours = sorted(name for name in named if name.startswith(OURS))
    if ours:
        raise ForbiddenError(
            f"{', '.join(ours)[:200]} belong to the platform: they say which events are committed, "
            "and only its own commits may set them"
        )
