"""Copies checkpoints and models from any location to any other, and verifies them on the way.

Promises: the copy appears whole or not at all, with the content that the manifest names. Nothing at the target is
replaced.
"""

import contextlib
import dataclasses
import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, commit, discarding
from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Describe, FileEntry, Manifest, Trigger
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.fetch import create_files, fetch, windows_of
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import SourceFile
from safepoint.checkpoint.tools.atomic_export import check_empty, export_to_folder, export_to_store
from safepoint.checkpoint.tools.inventory import Inventory, Item
from safepoint.checkpoint.tools.model_files import check_written, checking, is_examined, may_export
from safepoint.errors import (
    CheckpointError,
    ConflictError,
    StorageError,
    UsageError,
    printable,
)
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.leases import reading
from safepoint.foundation.units import ByteCounter, plural
from safepoint.storage.browsing import browse
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store

Progress = Callable[[int, int], None]
"""Receives bytes done and bytes in all."""

_TRAINING_ONLY = re.compile(
    r"optimizer\..*|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json|training_args\.bin"
    r"|safepoint_(state_.*|reference|kept_.*)\.pt|latest|zero_to_\w+\.py|(global_step|optimizer_|pytorch_model_fsdp_)\d+/.*"
    r"|pytorch_model_fsdp.*\.bin|scheduler.*\.bin|sampler.*\.bin|dl_state_dict.*\.bin|random_states_\d+\.pkl"
    r"|custom_checkpoint_\d+\.pkl|rank_\d+\.pt|sharded/.*"
)
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)([-_.].*)?\.(safetensors|bin)")


_log = logging.getLogger("safepoint")


def is_whole(name: str) -> bool:
    """Whether a file called `name` holds weights that `from_pretrained` reads: a whole model, or a shard of one."""
    return _WEIGHTS.fullmatch(name) is not None and _TRAINING_ONLY.fullmatch(name) is None


def check_outside(target: Location) -> None:
    """Raise UsageError for a location inside a checkpoint: a new file there would damage the checkpoint."""
    if any(step_of(Path(part)) is not None for part in target.path.split("/")[:-1]):
        raise UsageError(
            f"{target} is inside a checkpoint, and writing there would damage it", hint="use another location"
        )


def copy(source: Inventory, item: Item, target: Location, *, progress: Progress | None = None) -> bool:
    """Copy one checkpoint into another output location, under its own name.

    Args:
        source: the inventory with the checkpoint.
        item: the checkpoint.
        target: the output location to copy to; a folder is created.
        progress: see `Progress`.

    Returns:
        False if the target has the same checkpoint already, with all of its files.

    Raises:
        CheckpointError: the checkpoint is not complete, or damaged.
        ConflictError: another checkpoint has this name at the target, or a run is using the target.
        StorageError: a store cannot be used, or the disk has too little free space.
    """
    manifest = source.complete_manifest(item)
    store = open_store(target)
    if is_there(source, item, target):
        return False
    if target.is_folder:
        _into_folder(source, item, manifest, target.folder, progress)
    else:
        _into_store(source, item, manifest, store, progress)
    return True


def is_there(source: Inventory, item: Item, target: Location) -> bool:
    """Whether the same checkpoint is at the target already, with all of its files.

    If a copy in an object store lacks files, the result is False: `copy` uploads them.

    Raises:
        CheckpointError: the checkpoint `item` is not complete.
        ConflictError: something else at the target has the checkpoint's name; or a copy in a folder lacks files.
        StorageError: the target cannot be read.
    """
    manifest = source.complete_manifest(item)
    remote = RemoteFolder(open_store(target))
    present = remote.bytes_of_manifest(item.name)
    if present == manifest.to_bytes():
        faults = compare_listing(manifest.files, remote.files_of(item.name))
        if faults and target.is_folder:
            raise ConflictError(
                f"{target.child(item.name)} is a damaged copy of this checkpoint: {faults[0]}; nothing was copied",
                hint="delete or move away the damaged copy, then copy again",
            )
        return not faults
    if present is not None:
        raise ConflictError(
            f"{target} has a different {item.name}; nothing was copied",
            hint="copy to another location, or delete the checkpoint there first",
        )
    if target.is_folder and os.path.lexists(target.folder / item.name):
        raise ConflictError(
            f"{target.child(item.name)} exists already and is not a checkpoint; nothing was copied",
            hint=f"copy to another location, or first move {item.name} away from there",
        )
    return False


def _into_folder(source: Inventory, item: Item, manifest: Manifest, folder: Path, progress: Progress | None) -> None:
    output = OutputFolder(folder)
    output.prepare()
    output.claim(wait_s=0, waiting=lambda who: None)
    working = output.work / f"copy-{uuid.uuid4().hex}"
    destination = FolderDestination(working, output.root / item.name, trash=output.trash)
    try:
        with discarding(destination):
            _fetch(source, item, manifest.files, working, ByteCounter(progress, manifest.size_bytes))
            commit(destination, manifest)
    finally:
        output.release()


def _into_store(source: Inventory, item: Item, manifest: Manifest, store: Store, progress: Progress | None) -> None:
    destination = StoreDestination(RemoteFolder.as_guest(store), item.name)
    counter = ByteCounter(progress, manifest.size_bytes)
    destination.begin(manifest)
    with discarding(destination), _leased(source, item):
        destination.put_all(_source_files(source, item, manifest.files), counter.add)
        commit(destination, manifest)


def export(
    source: Inventory, item: Item, target: Location, *, with_code: bool = False, progress: Progress | None = None
) -> list[str]:
    """Copy the files that `from_pretrained` needs, but not the files of the training, to an empty folder or prefix.

    A file whose kind does not belong to a model is left out, with a warning; see `model_files`.

    An export to an object store writes nothing to a disk of this machine.

    Args:
        source: the inventory with the checkpoint.
        item: the checkpoint.
        target: a folder or a prefix that is empty or does not exist.
        with_code: whether the code of the model is exported, too.
        progress: see `Progress`.

    Returns:
        The files, sorted by path.

    Raises:
        CheckpointError: the checkpoint is damaged, or has no files of weights that `from_pretrained` reads.
        ConflictError: there is something at the target.
        StorageError: a store cannot be used, or the disk has too little free space.
        UsageError: the target is inside a checkpoint.
    """
    manifest = source.complete_manifest(item)
    data = browse(source.store, item.prefix)
    chosen = [entry for entry in manifest.files if not _TRAINING_ONLY.fullmatch(entry.path)]
    entries = tuple(entry for entry in chosen if may_export(data / entry.path, with_code=with_code))
    if not any(is_whole(entry.path) for entry in entries):
        raise CheckpointError(
            f"{item.where} holds no model in a known format (strategy {manifest.strategy}); nothing was exported",
            hint="resume from this checkpoint and save the model in the script",
        )
    warn_of_left_out([entry.path for entry in chosen if entry not in entries], item.where)
    counter = ByteCounter(progress, sum(entry.size_bytes for entry in entries))
    check_empty(target, has_manifest=True)
    if target.is_folder:

        def write(working: Path) -> None:
            _fetch(source, item, entries, working, counter)
            if not with_code:
                check_written(working, [entry.path for entry in entries])

        export_to_folder(target, write)
    else:
        with _leased(source, item):
            model = _source_files(source, item, entries)
            if not with_code:
                # The files that are examined are read as streams: the bytes that are sent are the ones examined.
                model = [
                    checking(file, (data / file.path).content) if is_examined(file.path) else file for file in model
                ]
            export_to_store(target, model, describe=as_final(manifest), progress=counter.add)
    return [entry.path for entry in entries]


def warn_of_left_out(paths: Sequence[str], where: object) -> None:
    """Warn about files that an export leaves out because of `model_files.may_export`.

    Args:
        paths: the files; without a file, there is no warning.
        where: the checkpoint.
    """
    if paths:
        _log.warning(
            "the export leaves out %s of %s, such as %s: only data of a model is exported, and nothing that a "
            "program would run or obey. If you trust the code in the checkpoint, --with-code exports it, too",
            plural(len(paths), "file"),
            where,
            printable(paths[0]),
        )


def as_final(manifest: Manifest) -> Describe:
    """A function that makes the manifest of a model that was exported from the checkpoint of `manifest`."""

    def describe(entries: tuple[FileEntry, ...]) -> Manifest:
        return dataclasses.replace(manifest, trigger=Trigger.FINAL, created=clock.utc_now(), files=entries)

    return describe


def _source_files(source: Inventory, item: Item, entries: Sequence[FileEntry]) -> list[SourceFile]:
    if source.folder is not None:
        root = source.folder / item.prefix
        return [SourceFile(entry.path, root / entry.path, entry, below=source.folder) for entry in entries]
    stored = browse(source.store, item.prefix)
    return [SourceFile(entry.path, (stored / entry.path).content, entry) for entry in entries]


def _fetch(source: Inventory, item: Item, entries: Sequence[FileEntry], working: Path, counter: ByteCounter) -> None:
    create_files(entries, working)
    parts = windows_of(entries)
    with _leased(source, item):
        try:
            fetch(source.store, item.prefix, parts, working, progress=counter.add)
        except OSError as error:
            raise StorageError(f"{working} cannot be written: {error}; nothing was copied") from error


def _leased(source: Inventory, item: Item) -> contextlib.AbstractContextManager[None]:
    """Hold a lease (a lock on the manifest), so that a running training does not delete the checkpoint. Do nothing
    for an object store."""
    if source.folder is None:
        return contextlib.nullcontext()
    return reading(source.folder / item.prefix / MANIFEST_NAME)
