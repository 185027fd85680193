"""What an engine is: it turns splits of a cut into Parquet files, and many of those into one.

The seam between the pipeline and whatever does the work. Both engines run the same
`stage_split` and `merge_files`, so a file is the same whoever wrote it; they differ only in
where that runs. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zombi_platform.cuts import Cut, Split, StagedFile
from zombi_platform.lake.small_files import MergedFile, SmallFiles
from zombi_platform.lake.storage import Storage
from zombi_platform.settings import Settings


@dataclass(frozen=True, slots=True)
class StagingJob:
    """Everything a worker must know to stage splits of one cut, on whatever machine it is."""

    url: str
    token: str | None = field(repr=False)
    table: str
    cut_id: int
    epoch: int
    """Of the lease under which the cut is staged; a worker with an old one is refused."""
    storage: Storage
    uploads: int = 1
    """Files of one split written at once, where writing is mostly waiting."""

    @classmethod
    def of(cls, settings: Settings, storage: Storage, cut: Cut, epoch: int) -> StagingJob:
        """The job for a cut under the lease with this epoch."""
        uploads = settings.max_concurrent_s3_uploads
        return cls(settings.url, settings.token, cut.table, cut.id, epoch, storage, uploads)


@dataclass(frozen=True, slots=True)
class SplitResult:
    """One split is staged: by this worker, or by another one that was first."""

    split: int
    kept: bool
    """Whether this worker's files are the ones recorded in the cut."""
    files: tuple[StagedFile, ...]
    """The files recorded in the cut, whoever wrote them."""
    seconds: float

    @property
    def events(self) -> int:
        return sum(file.events for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class MergingJob:
    """Everything a worker must know to merge small files of one table, wherever it is."""

    url: str
    token: str | None = field(repr=False)
    table: str
    epoch: int
    base: int
    """The snapshot that the files are in."""
    storage: Storage
    bytes_max: int
    """Most bytes of events that become one file."""
    downloads: int = 1
    """Files of one group read at once, where reading is mostly waiting."""

    @classmethod
    def of(
        cls, settings: Settings, storage: Storage, table: str, base: int, epoch: int
    ) -> MergingJob:
        """The job for a merge on top of a snapshot under the lease with this epoch."""
        return cls(
            url=settings.url,
            token=settings.token,
            table=table,
            epoch=epoch,
            base=base,
            storage=storage,
            bytes_max=settings.target_file_size_mb * 2**20,
            downloads=settings.max_concurrent_s3_uploads if storage.is_s3 else 1,
        )


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    def ready(self) -> None:
        """Raise EngineUnavailableError, soon, if staging now would fail."""

    def stage(
        self, job: StagingJob, splits: Sequence[Split], on_split: Callable[[SplitResult], None]
    ) -> None:
        """Stage these splits and tell of each as it is recorded.

        Returns when all are. Raises what stopped it; splits told of stay recorded, and
        staging the rest again is safe, here or elsewhere.
        """

    def merge(
        self,
        job: MergingJob,
        groups: Sequence[SmallFiles],
        on_merged: Callable[[MergedFile], None],
    ) -> None:
        """Make one file of each group and tell of it; no snapshot refers to it yet.

        A group with a bad file stops no other; it is raised when those are done. Raises what
        else stopped it. Every file that was begun has a tombstone.
        """

    def close(self) -> None:
        """Let go of sessions and threads."""
