"""Deletes the files that ended runs have left unfinished and, when requested, removes damaged checkpoints.

Files that a process may still be writing stay. In a folder, the lock shows whether a run is active. In an object
store, only the age of the files shows whether they may still be in use.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from safepoint.checkpoint.format.catalog import Aside
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.marks import is_name
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, RemoteFolder
from safepoint.checkpoint.tools.atomic_export import clean_export
from safepoint.checkpoint.tools.inventory import Inventory, Item, Kind
from safepoint.checkpoint.tools.removal import remove
from safepoint.foundation import clock
from safepoint.storage.store import Store

NOT_OURS = "a mark of an unfinished save names it, but the mark is newer than its objects, or states other sizes"
"""Why an unfinished checkpoint in an object store stays."""
Progress = Callable[[str, int, int], None]
"""Receives the name of the checkpoint that is read, bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The result of `repair`. In a dry run, nothing was deleted or moved.

    Args:
        unfinished: checkpoints in an object store that Safepoint began and never committed; they are deleted. Empty
            for a folder: there, `num_leftovers` counts them.
        recent: checkpoints that are not committed, and stay because a process may still be writing them.
        foreign: checkpoints that Safepoint did not write; they are never changed.
        damaged: checkpoints whose files differ from their manifest, with all faults; removed only when requested.
        moved_to: the folder to which damaged checkpoints were moved; None if none were moved.
        num_leftovers: how many working folders, unfinished uploads, marks and files of interrupted exports were
            deleted.
        newer: checkpoints that a later release wrote; they are never changed.
        strays: files in the folder of a checkpoint that its manifest does not list; they are never changed.
        failed: the checkpoints that could not be removed, each with the reason.
    """

    unfinished: tuple[Item, ...]
    recent: tuple[Item, ...]
    foreign: tuple[Item, ...]
    damaged: tuple[Item, ...]
    moved_to: str | None = None
    num_leftovers: int = 0
    newer: tuple[Item, ...] = ()
    strays: tuple[str, ...] = ()
    failed: tuple[tuple[Item, str], ...] = ()


def repair(
    inventory: Inventory,
    *,
    deep: bool,
    drop_damaged: bool,
    dry_run: bool,
    idle_s: float,
    progress: Progress | None = None,
) -> Repair:
    """Find unfinished and damaged checkpoints, and delete the files that may be deleted.

    Args:
        inventory: the checkpoints.
        deep: whether to read every file and compare its digest. If not, only names and sizes are compared.
        drop_damaged: whether to remove damaged checkpoints. In a folder they are moved aside, in a store deleted.
        dry_run: whether to change nothing.
        idle_s: in an object store, unfinished checkpoints are deleted if their files are older than this many
            seconds.
        progress: see `Progress`.

    Raises:
        ConflictError: a run is using the place.
        StorageError: the location cannot be read or written.
    """
    items = [item for item in inventory.items() if not item.is_of_other_user]
    damaged: list[Item] = []
    for item in items:
        if item.kind in {Kind.CHECKPOINT, Kind.PART} and not item.is_newer_format:
            watch = partial(progress, item.name) if progress is not None else None
            faults = inventory.verify(item, progress=watch) if deep else item.faults
            if faults:
                damaged.append(replace(item, faults=faults))
    pending = [item for item in items if item.kind is Kind.UNFINISHED]
    before_s = clock.wall_s() - idle_s
    recent = tuple(item for item in pending if item.modified_s >= before_s)
    unfinished = tuple(item for item in pending if item not in recent)
    doomed = damaged if drop_damaged else []
    moved_to, num_leftovers = None, 0
    failed: tuple[tuple[Item, str], ...] = ()
    if not dry_run and inventory.folder is not None:
        aside, num_leftovers = _clean_folder(OutputFolder(inventory.folder), doomed)
        moved_to = str(aside.place) if aside.place is not None else None
        of_path = {inventory.folder / item.prefix: item for item in doomed}
        failed = tuple((of_path[path], reason) for path, reason in aside.left.items())
    elif not dry_run:
        # The sweep comes first, because it reads the marks, which are deleted below.
        num_leftovers = RemoteFolder(inventory.store).sweep(begun_before_s=before_s)
        failed = remove(inventory, [*unfinished, *doomed]).failed
        failed += tuple((item, NOT_OURS) for item in unfinished if _is_left(inventory.store, item.prefix))
        unfinished = tuple(item for item in unfinished if item not in [one for one, _ in failed])
        num_leftovers += clean_export(inventory.store, before_s=before_s)
        num_leftovers += _drop_marks(inventory, before_s, keep={item.name for item in items})
    return Repair(
        unfinished=unfinished,
        recent=recent,
        foreign=tuple(item for item in items if item.kind is Kind.FOREIGN),
        damaged=tuple(damaged),
        moved_to=moved_to,
        newer=tuple(item for item in items if item.is_newer_format),
        strays=tuple(f"{item.where}/{path}" for item in items for path in item.strays),
        num_leftovers=num_leftovers,
        failed=failed,
    )


def _is_left(store: Store, name: str) -> bool:
    """Whether objects that a mark names are still there."""
    remote = RemoteFolder(store)
    return bool(remote.marked_files(name).keys() & remote.files_of(name).keys())


def _drop_marks(inventory: Inventory, before_s: float, *, keep: Collection[str]) -> int:
    """Delete the marks of unfinished checkpoints whose other objects are gone; returns the number of marks."""
    marks = [item for item in inventory.store.list(UNFINISHED) if item.modified_s < before_s]
    names = {item.key.removeprefix(f"{UNFINISHED}/") for item in marks}
    doomed = sorted(name for name in names if is_name(name) and name not in keep)
    for name in doomed:
        RemoteFolder.as_guest(inventory.store).delete(name)
    return len(doomed)


def _clean_folder(output: OutputFolder, damaged: Sequence[Item]) -> tuple[Aside, int]:
    """Move `damaged` aside and delete leftovers of ended runs.

    Returns:
        Where the damaged checkpoints are now; and the number of leftovers.
    """
    if not os.path.lexists(output.control):  # Safepoint never wrote here, so it creates no files here
        return Aside(), 0
    output.check_control()  # do not call `create` or `prepare`, which write: the disk may be full
    has_locks = output.claim(wait_s=0, waiting=lambda who: None)
    try:
        num_deleted = output.clean() if has_locks else 0
        return output.set_aside([output.root / item.prefix for item in damaged]), num_deleted
    finally:
        output.release()
