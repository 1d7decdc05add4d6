"""Deletes all checkpoints of a run, and its final model."""

from collections.abc import Iterable
from dataclasses import dataclass

from safepoint.checkpoint.tools.inventory import Inventory, Item, Kind
from safepoint.errors import AccessDeniedError, ConflictError, StorageError
from safepoint.foundation.units import plural

COMMAND = "remove-checkpoints"
"""The name by which a command outside of the cluster calls `remove_all` in a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The result of `remove`.

    Args:
        deleted: the items that are gone.
        kept: the items that a process reads, or that a later release wrote.
        failed: the items that could not be deleted, each with the reason.
    """

    deleted: tuple[Item, ...] = ()
    kept: tuple[Item, ...] = ()
    failed: tuple[tuple[Item, str], ...] = ()


def remove(inventory: Inventory, items: Iterable[Item]) -> Removal:
    """Delete items. If an item cannot be deleted (an immutable folder, for example), the others are still deleted.

    Raises:
        ConflictError: a run has begun to use the object store meanwhile.
        StorageError: the location cannot be reached.
    """
    deleted: list[Item] = []
    kept: list[Item] = []
    failed: list[tuple[Item, str]] = []
    for item in items:
        try:
            (deleted if inventory.delete(item) else kept).append(item)
        except OSError as error:
            failed.append((item, error.strerror or str(error)))
        except AccessDeniedError as error:
            failed.append((item, error.message))
    return Removal(deleted=tuple(deleted), kept=tuple(kept), failed=tuple(failed))


def remove_all(inventories: Iterable[Inventory], output: str) -> int:
    """Delete the checkpoints and the final model of a run. Files that Safepoint did not write stay. In a folder that
    everyone may write to, the checkpoints of other users stay, too.

    Args:
        inventories: the inventory of the run's output location; for an object store, also the inventory of the local
            folder from which the run uploads.
        output: the output location, for messages.

    Returns:
        The number of deleted checkpoints. A checkpoint in several places is counted once.

    Raises:
        ConflictError: a process reads a checkpoint, or a later release wrote it; the others are deleted.
        StorageError: a location cannot be reached; or a checkpoint cannot be deleted, and the others are deleted.
    """
    deleted: set[str] = set()
    kept: set[str] = set()
    failed: dict[str, str] = {}
    for inventory in inventories:
        own = [one for one in inventory.items() if one.kind is not Kind.FOREIGN and not one.is_of_other_user]
        found = remove(inventory, own)
        deleted |= {item.name for item in found.deleted}
        kept |= {item.name for item in found.kept}
        failed |= {item.where: reason for item, reason in found.failed}
    if failed:
        where, reason = next(iter(failed.items()))
        others = f", and {plural(len(failed) - 1, 'other')}" if len(failed) > 1 else ""
        but = f" but {', '.join(sorted(kept))}, which a process reads, or a later release wrote" if kept else ""
        raise StorageError(
            f"{where}{others} cannot be deleted ({reason}); the other checkpoints were deleted{but}",
            hint="the job still exists; fix the owner or the attributes of the folder, then delete the job again",
        )
    if kept:
        raise ConflictError(
            f"{', '.join(sorted(kept))} in {output} is being read, or was written by a later release, and was not "
            "deleted; all others were deleted",
            hint="the job still exists; delete the job once more when no process reads its checkpoints",
        )
    return len(deleted)
