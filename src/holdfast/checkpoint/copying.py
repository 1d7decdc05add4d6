"""Copies of checkpoints and of models, from any location to any other, verified on the way.

Promises: the copy appears whole or not at all, and only with the content that the manifest names; what is at the
target already is never replaced.
"""

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from holdfast.checkpoint.inventory import Inventory, Item, Kind
from holdfast.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.checkpoint.output_folder import OutputFolder
from holdfast.checkpoint.publishing import Publisher
from holdfast.checkpoint.remote import RemoteFolder
from holdfast.checkpoint.transfer import fetch, prepare, publish, windows_of
from holdfast.errors import CheckpointError, ConflictError, StorageError
from holdfast.foundation import files
from holdfast.foundation.units import ByteCounter
from holdfast.storage.location import Location, Scheme
from holdfast.storage.opening import open_store
from holdfast.storage.store import Store

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

_TRAINING_ONLY = re.compile(
    r"optimizer\..*|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json|training_args\.bin"
    r"|holdfast_state_.*\.pt|latest|zero_to_\w+\.py|(global_step|optimizer_|pytorch_model_fsdp_)\d+/.*"
    r"|pytorch_model_fsdp.*\.bin|scheduler.*\.bin|sampler.*\.bin|dl_state_dict.*\.bin|random_states_\d+\.pkl"
    r"|custom_checkpoint_\d+\.pkl|rank_\d+\.pt|sharded/.*"
)
WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)([-_.].*)?\.(safetensors|bin)")
"""Names of files that hold a model as a whole."""


def copy(source: Inventory, item: Item, target: Location, *, progress: Progress | None = None) -> bool:
    """Copy one checkpoint into another output location, under its own name.

    Args:
        source: where it is.
        item: which.
        target: the output location that gets it; a folder is created.
        progress: see `Progress`; bytes that are fetched and bytes that are uploaded both count.

    Returns:
        False when the same checkpoint is there already.

    Raises:
        CheckpointError: it is not complete, or damaged.
        ConflictError: another checkpoint has this name at the target, or a run is using the target.
        StorageError: a store cannot be used, or the disk has too little room.
    """
    manifest = _complete(item)
    store = open_store(target)
    if is_there(item, target):
        return False
    if target.scheme is Scheme.FILE:
        _into_folder(source, item, manifest, target.folder, progress)
    else:
        _into_store(source, item, manifest, store, progress)
    return True


def is_there(item: Item, target: Location) -> bool:
    """Whether the same checkpoint is at the target already.

    Raises:
        CheckpointError: it is not complete.
        ConflictError: something else has its name there.
        StorageError: the target cannot be read.
    """
    manifest = _complete(item)
    present = RemoteFolder(open_store(target)).bytes_of_manifest(item.name)
    if present == manifest.to_bytes():
        return True
    if present is not None:
        raise ConflictError(
            f"{target} has another {item.name}; nothing was copied",
            hint="copy to another location, or delete that one first",
        )
    if target.scheme is Scheme.FILE and os.path.lexists(target.folder / item.name):
        raise ConflictError(
            f"{target.child(item.name)} is there already, and not a checkpoint; nothing was copied",
            hint="copy to another location, or move it away first",
        )
    return False


def _into_folder(source: Inventory, item: Item, manifest: Manifest, folder: Path, progress: Progress | None) -> None:
    output = OutputFolder(folder)
    output.prepare()
    output.claim(wait_s=0, waiting=lambda who: None)
    working = output.work / f"copy-{uuid.uuid4().hex}"
    try:
        _bring(source, item, manifest.files, working, ByteCounter(progress, manifest.size_bytes))
        publish(manifest, working, output.root / item.name, trash=output.trash)
    finally:
        files.delete_tree(working)
        output.release()


def _into_store(source: Inventory, item: Item, manifest: Manifest, store: Store, progress: Progress | None) -> None:
    counter = ByteCounter(progress, 2 * manifest.size_bytes)
    with _staging(source.folder) as staging:
        working = staging / item.name
        _bring(source, item, manifest.files, working, counter)
        files.write_atomic(working / MANIFEST_NAME, manifest.to_bytes(), durable=False)
        record = staging / "sent.json"
        Publisher(RemoteFolder.as_guest(store)).publish(working, name=item.name, record=record, progress=counter.add)


def export(source: Inventory, item: Item, target: Location, *, progress: Progress | None = None) -> list[str]:
    """Copy what `from_pretrained` needs, and nothing of the training, to a place of its own.

    Args:
        source: where the checkpoint is.
        item: which.
        target: a folder or a prefix in which there is nothing yet.
        progress: see `Progress`.

    Returns:
        The files, sorted by path.

    Raises:
        CheckpointError: it is damaged, or holds no whole weights.
        ConflictError: there is something at the target.
        StorageError: a store cannot be used, or the disk has too little room.
    """
    manifest = _complete(item)
    entries = tuple(entry for entry in manifest.files if not _TRAINING_ONLY.fullmatch(entry.path))
    if not any(WEIGHTS.fullmatch(entry.path) for entry in entries):
        raise CheckpointError(
            f"{item.where} holds no weights in one piece (strategy {manifest.strategy}); nothing was exported",
            hint="resume from it and save the model from there"
            if source.folder is not None
            else "copy the checkpoint to a folder of this machine, and export it from there",
        )
    paths = [entry.path for entry in entries]

    def fill(working: Path, counter: ByteCounter) -> list[str]:
        _bring(source, item, entries, working, counter)
        return paths

    size_bytes = sum(entry.size_bytes for entry in entries)
    return deliver(target, size_bytes, fill, beside=source.folder, progress=progress)


def deliver(
    target: Location,
    size_bytes: int,
    fill: Callable[[Path, ByteCounter], list[str]],
    *,
    beside: Path | None,
    progress: Progress | None,
) -> list[str]:
    """Make a model at a place of its own, so that it appears whole or not at all.

    Args:
        target: a folder or a prefix in which there is nothing yet.
        size_bytes: of the model.
        fill: makes the files in a folder that is not there yet, durably, and returns their paths.
        beside: the output folder on whose disk the files wait for a store; None for the system's place.
        progress: see `Progress`.

    Returns:
        What `fill` returned.

    Raises:
        ConflictError: there is something at the target.
        StorageError: the store cannot be used.
        OSError: the disk is full or gone.
    """
    store = open_store(target)
    if next(iter(store.list()), None) is not None:
        raise ConflictError(f"{target} is not empty; nothing was exported", hint="name a new place")
    if target.scheme is Scheme.FILE:
        folder = target.folder.absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        working = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        try:
            paths = fill(working, ByteCounter(progress, size_bytes))
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()  # it is empty
            working.rename(folder)
            files.fsync_folder(folder.parent)
        finally:
            files.delete_tree(working)
        return paths
    counter = ByteCounter(progress, 2 * size_bytes)
    with _staging(beside) as staging:
        paths = fill(staging / "model", counter)
        for path in paths:
            store.upload(path, staging / "model" / path, progress=counter.add)
    return paths


def _complete(item: Item) -> Manifest:
    if item.kind is Kind.PART:
        raise CheckpointError(
            f"{item.where} is one node's part of a checkpoint; nothing was copied",
            hint="the whole is in the object store of its run, and on every node that resumed from it",
        )
    if item.manifest is None or item.faults:
        raise CheckpointError(
            f"{item.where} is not a complete checkpoint: {item.faults[0]}; nothing was copied",
            hint="see `holdfast checkpoints verify`",
        )
    return item.manifest


def _bring(source: Inventory, item: Item, entries: Sequence[FileEntry], working: Path, counter: ByteCounter) -> None:
    prepare(entries, working)
    parts = windows_of(entries)
    with contextlib.ExitStack() as lease:
        if source.folder is not None:  # or retention of a running training takes it away meanwhile
            lease.enter_context(files.reading(source.folder / item.prefix / MANIFEST_NAME))
        try:
            fetch(source.store, item.prefix, parts, working, progress=counter.add)
        except OSError as error:
            raise StorageError(f"{working} cannot be written: {error}; nothing was copied") from error


@contextlib.contextmanager
def _staging(source: Path | None) -> Generator[Path]:
    """A folder for what is on its way from one store to another; on the source's disk when it has one."""
    beside = OutputFolder(source).work if source is not None else None
    place = beside if beside is not None and os.access(beside, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="copy-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["WEIGHTS", "Progress", "copy", "deliver", "export", "is_there"]
