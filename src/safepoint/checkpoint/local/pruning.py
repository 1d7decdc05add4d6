"""Pruning: deletes the checkpoints that no retention policy keeps, in a folder and in an object store alike."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.local.retention import Policy
from safepoint.foundation.events.run_events import Pruned, SaveFailed
from safepoint.foundation.events.stream import Event


class CheckpointFolder(Protocol):
    """The checkpoints of a run, in a folder or in an object store."""

    def steps(self, *, deadline_s: float | None = None) -> list[int]:
        """The steps of the committed checkpoints, newest first; not verified."""
        ...

    def superseded(
        self, policies: Sequence[Policy], *, protected: Collection[int] = (), deadline_s: float | None = None
    ) -> list[int]:
        """The steps that no policy keeps, oldest first; see `select_superseded`."""
        ...

    def delete(self, name: str, *, deadline_s: float | None = None) -> bool:
        """Delete the checkpoint called `name` so that readers see it whole or not at all.

        Returns:
            False when a process is reading or uploading it; then it stays.
        """
        ...

    def where(self, name: str) -> str:
        """The checkpoint's place in full, for people."""
        ...


def prune(
    folder: CheckpointFolder,
    policies: Sequence[Policy],
    report: Callable[[Event], None],
    *,
    protected: Collection[int] = (),
    deadline_s: float | None = None,
) -> None:
    """Delete the checkpoints that no policy keeps, and report each deletion.

    An OSError is reported as an event, and the next save tries again.

    Args:
        folder: the checkpoints.
        policies: which checkpoints to keep; without any, all are kept.
        report: receives the events.
        protected: steps that are never deleted.
        deadline_s: when to give up on a store.

    Raises:
        ConflictError: another attempt has claimed the store.
        StorageError: the store cannot be used.
    """
    try:
        for step in folder.superseded(policies, protected=protected, deadline_s=deadline_s):
            name = checkpoint_name(step)
            if folder.delete(name, deadline_s=deadline_s):
                report(Pruned(step=step, path=folder.where(name)))
    except OSError as error:
        reason = f"an older checkpoint could not be deleted: {error}"
        newest = 0
        with contextlib.suppress(OSError):  # the same disk may refuse this too
            newest = max(folder.steps(deadline_s=deadline_s), default=0)
        consequence = "it stays until the next save"
        report(SaveFailed(step=newest, trigger="retention", reason=reason, consequence=consequence))
