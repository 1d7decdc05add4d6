"""The lists that the client returns. They are lists, as in Kubeflow's client, and notebooks show them as tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from safepoint.sdk.values import Checkpoint, TrainJob

if TYPE_CHECKING:  # at run time these imports would slow down the import of the SDK
    from safepoint.notebook.views import CheckpointView, JobView


class JobList(list[TrainJob]):
    """Jobs, oldest first."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> TrainJob: ...
    @overload
    def __getitem__(self, index: slice, /) -> "JobList": ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> "TrainJob | JobList":
        return JobList(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def _repr_html_(self) -> str | None:
        from safepoint.notebook.html import jobs_html

        views = self._views()
        return None if views is None else jobs_html(views)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from safepoint.notebook.text import jobs_text

        views = self._views()
        printer.text(repr(self) if cycle or not views else jobs_text(views))

    def _views(self) -> "list[JobView] | None":
        """The views of the jobs; None if an object in the list has no view."""
        views = [view for job in self if (view := getattr(job, "view", None)) is not None]
        return views if len(views) == len(self) else None


class CheckpointList(list[Checkpoint]):
    """Checkpoints, newest first."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Checkpoint: ...
    @overload
    def __getitem__(self, index: slice, /) -> "CheckpointList": ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> "Checkpoint | CheckpointList":
        return CheckpointList(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def _repr_html_(self) -> str | None:
        from safepoint.notebook.html import checkpoints_html

        return checkpoints_html(_rows(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from safepoint.notebook.text import checkpoints_text

        printer.text(repr(self) if cycle or not self else checkpoints_text(_rows(self)))


def _rows(checkpoints: Iterable[Checkpoint]) -> "list[CheckpointView]":
    from safepoint.notebook.views import CheckpointView

    return [
        CheckpointView(
            name=one.name,
            state="complete" if one.is_complete else "not complete",
            trigger=one.trigger,
            size_bytes=one.size_bytes,
            num_files=one.num_files,
            created_s=one.created.timestamp(),
            path=one.path,
        )
        for one in checkpoints
    ]
