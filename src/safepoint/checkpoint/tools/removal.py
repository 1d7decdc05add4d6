"""Deletes all checkpoints of a run, and its final model."""

from collections.abc import Iterable

from safepoint.checkpoint.tools.inventory import Inventory, Kind
from safepoint.errors import ConflictError

COMMAND = "remove-checkpoints"
"""The name by which a command outside of the cluster calls `remove_all` in a pod."""


def remove_all(inventories: Iterable[Inventory], output: str) -> int:
    """Delete the checkpoints and the final model of a run. What Safepoint did not write stays.

    Args:
        inventories: of the run's output location, and of the folder in front of an object store.
        output: the output location, for messages.

    Returns:
        The number of deleted checkpoints. A checkpoint in several places counts once.

    Raises:
        ConflictError: a process reads a checkpoint, or a later release wrote it; the others are deleted.
        StorageError: a location cannot be reached.
    """
    deleted: set[str] = set()
    kept: set[str] = set()
    for inventory in inventories:
        for item in inventory.items():
            if item.kind is not Kind.FOREIGN:
                names = deleted if inventory.delete(item) else kept
                names.add(item.name)
    if kept:
        raise ConflictError(
            f"{', '.join(sorted(kept))} in {output} is being read, or was written by a later release: it was not "
            "deleted; the others were deleted",
            hint="the job still exists; delete it once more when no process reads the checkpoint",
        )
    return len(deleted)
