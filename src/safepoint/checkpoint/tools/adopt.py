"""Writes manifests for checkpoints that another program wrote, so that Safepoint treats them as its own.

Promises: a checkpoint is adopted only if `examine` finds no fault in it. The files stay where they are and are not
changed; the manifest is written last. From then on, a changed bit is found when the checkpoint is verified, and
retention counts the checkpoint.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from safepoint.checkpoint.commit import Destination, Record, commit, fsync_parents
from safepoint.checkpoint.foreign.describe import describe
from safepoint.checkpoint.foreign.examine import examine
from safepoint.checkpoint.foreign.layout import ARGUMENTS
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import Fault, compare_listing, list_files
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.tools.inventory import Inventory, Item
from safepoint.errors import CheckpointError, SafepointError, SaveError
from safepoint.foundation import files
from safepoint.foundation.shared_folders.held_folder import HeldFolder, held

Progress = Callable[[str, int, int], None]
"""Receives the name of the checkpoint that is read, bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The result for one checkpoint.

    Args:
        item: the checkpoint, as it was listed.
        faults: why it was not adopted; empty if it was.
    """

    item: Item
    faults: tuple[Fault, ...]


def adopt(
    inventory: Inventory,
    items: list[Item],
    *,
    accumulation: int | None = None,
    dry_run: bool,
    progress: Progress,
) -> list[Adoption]:
    """Adopt checkpoints, oldest first.

    Args:
        inventory: the inventory of the checkpoints' location.
        items: foreign checkpoints, newest first.
        accumulation: see `examine`.
        dry_run: whether to only examine the checkpoints.
        progress: see `Progress`.

    Raises:
        ConflictError: a run is using the location.
        StorageError: the location cannot be read or written.
    """
    output = OutputFolder(inventory.folder) if inventory.folder is not None else None
    if output is not None and items and not dry_run:
        output.prepare()
        output.claim(wait_s=0, waiting=lambda who: None)
    try:
        return [
            Adoption(
                item=item,
                faults=_adopt(inventory, item, accumulation=accumulation, dry_run=dry_run, progress=progress),
            )
            for item in reversed(items)
        ]
    finally:
        if output is not None:
            output.release()


def _adopt(
    inventory: Inventory, item: Item, *, accumulation: int | None, dry_run: bool, progress: Progress
) -> tuple[Fault, ...]:
    try:
        with contextlib.ExitStack() as holding:
            place = None
            if inventory.folder is not None:
                place = holding.enter_context(held(inventory.folder / item.name))
            return _adopt_held(inventory, item, place, accumulation=accumulation, dry_run=dry_run, progress=progress)
    except SafepointError:
        raise
    except OSError as error:
        return (Fault(file=".", reason=str(error)),)
    except Exception as error:  # noqa: BLE001  hostile content; the caller continues with the next checkpoint
        return (Fault(file=".", reason=f"it is damaged: {type(error).__name__}: {error}"),)


def _adopt_held(
    inventory: Inventory,
    item: Item,
    place: HeldFolder | None,
    *,
    accumulation: int | None,
    dry_run: bool,
    progress: Progress,
) -> tuple[Fault, ...]:
    found = examine(inventory.store, item.name, accumulation=accumulation)
    if found.faults:
        return found.faults
    if not found.is_batch_known:
        reason = (
            "it is missing or damaged, and no other file states the micro-batches of a step; use "
            "--gradient-accumulation"
        )
        return (Fault(file=ARGUMENTS, reason=reason),)
    if dry_run:
        return ()
    try:
        manifest = describe(inventory.store, found, lambda done, total: progress(item.name, done, total))
    except CheckpointError as error:
        return (Fault(file=".", reason=error.message),)
    destination: Destination[Record]
    if place is not None:
        destination = _InPlace(place)
    else:
        destination = StoreDestination(RemoteFolder.as_guest(inventory.store), item.name)
    return _commit(destination, manifest)


def _commit(destination: Destination[Record], manifest: Manifest) -> tuple[Fault, ...]:
    """Commit a checkpoint. If this fails, return the fault, so that the caller can continue with the next
    checkpoint."""
    try:
        commit(destination, manifest)
    except (SaveError, OSError) as error:  # for example, this user may not write to the folder
        return (Fault(file=".", reason=str(error)),)
    return ()


class _InPlace:
    """A folder that has its name and its files already, and gets a manifest; see `Destination`.

    The manifest is written into the open folder, even if another process has given the folder's name to a link.
    """

    def __init__(self, place: HeldFolder) -> None:
        self._place = place
        self._folder = place.inside
        self._record: Record | None = None

    def prepare(self, record: Record | None) -> None:
        """See `Destination`."""
        if record is None:
            raise TypeError("a checkpoint needs a manifest")
        present = list_files(self._folder)
        faults = compare_listing(record.files, present, extra=True)
        if faults:
            raise SaveError(f"{self._place.path} changed while it was read: {faults[0]}; it was not adopted")
        for path in present:
            files.fsync_file(self._folder / path)
        fsync_parents(self._folder, present)
        self._record = record

    def publish(self) -> None:
        """See `Destination`."""
        assert self._record is not None
        if not self._place.has_name(self._place.path):
            raise SaveError(f"{self._place.path} was replaced while it was read; it was not adopted")
        files.write_atomic(self._folder / self._record.file_name, self._record.to_bytes(), durable=True)

    def discard(self) -> None:
        """See `Destination`; nothing was written."""
