"""Exports models from checkpoints whose layout `from_pretrained` cannot read.

These are the sharded layouts of torch.distributed.checkpoint and DeepSpeed's ZeRO, and the files that sessions and
Lightning write with `torch.save`. Safepoint or another tool may have written the checkpoint, in a folder or an object
store. No tensor is loaded: ranges of bytes are copied from file to file. An export from one object store to another
writes nothing to a disk of this machine.
"""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from safepoint.checkpoint.format.read_ranges import ReadRanges
from safepoint.checkpoint.format.verify import list_files
from safepoint.checkpoint.remote.fetch import Window, check, check_room, windows_of
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools.atomic_export import check_empty, export_to_folder, export_to_store
from safepoint.checkpoint.tools.copy import Progress
from safepoint.checkpoint.tools.inventory import Inventory, Item, Kind
from safepoint.checkpoint.tools.model_files import checking, may_export
from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.dcp_weights import METADATA, dcp_weights
from safepoint.checkpoint.weights.state_dict_weights import state_dict_file, state_dict_weights
from safepoint.checkpoint.weights.stored_weight import StoredWeight, gather
from safepoint.checkpoint.weights.zero_weights import zero_folder, zero_weights
from safepoint.errors import CheckpointError, StorageError, UsageError
from safepoint.foundation.shared_folders.leases import reading
from safepoint.foundation.units import ByteCounter
from safepoint.storage.browsing import OnRead, StorePath, browse
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.store import Store

_DCP_FOLDERS = (".", "pytorch_model_fsdp_0", "sharded", "model")
_BESIDE = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|vocab\..*|merges\.txt|chat_template\..*"
    r"|preprocessor_config\.json|processor_config\.json|[^.].*\.model"
)
"""The names of small files that belong to a model."""


def is_in_pieces(store: Store, prefix: str = "") -> bool:
    """Whether a checkpoint has a sharded model or a file of `torch.save`, and no model that `from_pretrained` can
    read.

    Args:
        store: where the checkpoint is, a folder or an object store.
        prefix: the key of the checkpoint in the store. If empty, the location of the store is the checkpoint itself.

    Raises:
        StorageError: the store cannot be read.
    """
    folder = browse(store, prefix)
    with contextlib.suppress(CheckpointError):  # the export itself raises the error
        folder, _ = _browse(folder, store, prefix)
    is_whole = any(copying.is_whole(path.name) for path in folder.iterdir())
    return not is_whole and _place_of(folder) is not None


def export_item(
    inventory: Inventory,
    item: Item,
    target: Location,
    *,
    with_code: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write the model of a checkpoint of any layout, in the layout that `from_pretrained` reads.

    Args:
        inventory: the inventory with the checkpoint.
        item: the checkpoint.
        target: see `export_pieces`.
        with_code: see `copying.export`.
        progress: see `copying.Progress`.

    Returns:
        The files, sorted.

    Raises:
        SafepointError: see `export_pieces` and `copying.export`.
    """
    is_readable = inventory.folder is not None or item.kind in {Kind.CHECKPOINT, Kind.FOREIGN}
    if is_readable and is_in_pieces(inventory.store, item.prefix):
        return export_pieces(inventory.store, item.prefix, target, with_code=with_code, progress=progress)
    return copying.export(inventory, item, target, with_code=with_code, progress=progress)


def _place_of(folder: StorePath) -> StorePath | None:
    """The folder with the shards, or the file of `torch.save`; None if the checkpoint has neither."""
    dcp = next((folder / name for name in _DCP_FOLDERS if (folder / name / METADATA).is_file()), None)
    return dcp or zero_folder(folder) or state_dict_file(folder)


def export_pieces(
    store: Store, prefix: str, target: Location, *, with_code: bool = False, progress: Progress | None = None
) -> list[str]:
    """Write the model of a checkpoint for which `is_in_pieces` is true, in the layout that `from_pretrained` reads.

    If the checkpoint has a manifest, all bytes that the export uses are compared with the digests in the manifest
    before the first byte is written. So the weights are read twice. The bytes of the second read are compared with
    the bytes of the first read.

    Args:
        store: where the checkpoint is, a folder or an object store.
        prefix: the key of the checkpoint in the store. If empty, the location of the store is the checkpoint itself.
        target: a folder or a prefix that is empty or does not exist.
        with_code: see `copying.export`.
        progress: see `copying.Progress`.

    Returns:
        The files, sorted.

    Raises:
        CheckpointError: the checkpoint is damaged, or changed during the export.
        ConflictError: the target is not empty.
        StorageError: a store cannot be used, or the disk has too little free space.
        UsageError: the checkpoint holds adapters, or the target is inside a checkpoint.
    """
    used: ReadRanges | None = None

    def note(key: str, start: int, data: bytes) -> None:
        if used is not None:
            used.note(key, start, data)

    with contextlib.ExitStack() as lease:
        local = store.location.folder / prefix if store.location.is_folder else None
        # The lease is a lock. While it is held, a running training does not delete the checkpoint.
        if local is not None and (local / MANIFEST_NAME).is_file():
            lease.enter_context(reading(local / MANIFEST_NAME))
        folder, manifest = _browse(browse(store, prefix), store, prefix, note)
        if local is not None and manifest is None and None in list_files(local).values():
            raise CheckpointError(f"{local} holds a link or a special file; nothing was exported")
        if (folder / "pytorch_model_fsdp_1").is_dir():
            raise CheckpointError(f"{folder} holds several models; nothing was exported")
        used = None if manifest is None else ReadRanges()
        pieces = _place_of(folder)
        if pieces is None:
            raise CheckpointError(f"{folder} holds no sharded model; nothing was exported")
        check_empty(target, has_manifest=manifest is not None)
        if manifest is not None and manifest.base is not None:
            raise UsageError(
                f"{folder} holds adapters of {manifest.base['name'] or 'a model without a name'}, in a layout that "
                "PEFT cannot read; nothing was exported",
                hint="resume from this checkpoint and call `model.save_pretrained` in the script",
            )
        weights = _weights(folder, pieces, Budget(folder.total_bytes))
        folder.forget_blocks()
        if manifest is not None and used is not None:
            for weight in weights:
                for run in weight.runs:
                    used.expect(cast("StorePath", run.path).key, run.offset, run.num_bytes)
            _check_windows(folder, store, prefix, manifest, used)

        def is_same() -> None:
            changed = folder.changed()
            if changed is not None:
                raise CheckpointError(f"{folder / changed} has changed while it was read; nothing was exported")

        model = _model(folder, weights, manifest, used, with_code=with_code)
        counter = ByteCounter(progress, sum(file.size_bytes for file in model))

        def write(working: Path) -> None:
            _write(model, working, counter)
            is_same()

        if target.is_folder:
            export_to_folder(target, write)
        else:
            describe = None if manifest is None else copying.as_final(manifest)
            export_to_store(target, model, describe=describe, progress=counter.add, check=is_same)
        return sorted(file.path for file in model)


def _browse(
    folder: StorePath, store: Store, prefix: str, on_read: OnRead | None = None
) -> tuple[StorePath, Manifest | None]:
    """The files of a checkpoint, and its manifest. If it has a manifest, the files are only those that the manifest
    lists, because a stranger may have added others.

    Args:
        folder: the folder of the checkpoint, with all its files.
        store: see `is_in_pieces`.
        prefix: see `is_in_pieces`.
        on_read: see `browse`.

    Raises:
        CheckpointError: the manifest is invalid.
        StorageError: the store cannot be read.
    """
    manifest = _stored_manifest(folder)
    only = None if manifest is None else {entry.path for entry in manifest.files}
    return browse(store, prefix, on_read=on_read, only=only), manifest


def _stored_manifest(folder: StorePath) -> Manifest | None:
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    if path.size_bytes > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes; nothing was exported")
    return Manifest.from_bytes(path.read_bytes())


def _weights(folder: StorePath, pieces: StorePath, budget: Budget | None = None) -> list[StoredWeight]:
    budget = budget or Budget()
    try:
        if pieces.is_file():
            weights = state_dict_weights(pieces, budget)
        else:
            weights = (dcp_weights if (pieces / METADATA).is_file() else zero_weights)(pieces, budget)
        budget.spend(Cost.BYTES, sum(weight.shape.num_bytes for weight in weights))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error.message}; nothing was exported", hint=error.hint) from error
    except (StorageError, OSError):
        raise
    except Exception as error:  # hostile content may raise anything
        raise CheckpointError(f"{folder} has an unknown layout, nothing was exported: {error!r}") from error
    if len({weight.shape.name for weight in weights}) != len(weights):
        raise CheckpointError(f"two weights in {folder} have the same name; nothing was exported")
    return weights


def _model(
    folder: StorePath,
    weights: Sequence[StoredWeight],
    manifest: Manifest | None,
    known: ReadRanges | None,
    *,
    with_code: bool,
) -> list[SourceFile]:
    """The files of the model, in the layout that `from_pretrained` reads."""
    entries = {} if manifest is None else {entry.path: entry for entry in manifest.files}
    beside = [path for path in folder.iterdir() if path.is_file() and _is_beside(path.name)]
    chosen = [path for path in beside if may_export(path, with_code=with_code)]
    copying.warn_of_left_out([path.key for path in beside if path not in chosen], folder)
    files = [SourceFile(path.key, path.content, entries.get(path.key)) for path in chosen]
    return [
        *(SourceFile(name, content) for name, content in gather(weights, known=known).items()),
        *(file if with_code else checking(file, path.content) for file, path in zip(files, chosen, strict=True)),
    ]


def _is_beside(name: str) -> bool:
    return name.endswith(".py") or _BESIDE.fullmatch(name) is not None


def _write(model: Sequence[SourceFile], working: Path, counter: ByteCounter) -> None:
    check_room(
        working,
        ((file.path, file.size_bytes) for file in model),
        consequence="nothing was exported",
        hint="free some space, or name another folder",
    )
    place = LocalStore(Location.of_folder(working))
    for file in model:
        upload_verified(place, file.path, file, progress=counter.add)


def _check_windows(folder: StorePath, store: Store, prefix: str, manifest: Manifest, used: ReadRanges) -> None:
    """Compare parts of files with the digests in the manifest: the parts from which the export reads ranges
    (`used`)."""
    windows = set(used.parts())
    entries = {entry.path: entry for entry in manifest.files}
    chosen: list[Window] = []
    for key in sorted({key for key, _ in windows}):
        if key not in entries or entries[key].size_bytes != (folder / key).size_bytes:
            raise _altered(folder, key)
        parts = windows_of([entries[key]])
        chosen += [part for number, part in enumerate(parts) if (key, number) in windows]
    wrong = check(store, prefix, chosen, read=used)
    if wrong:
        raise _altered(folder, min(wrong))


def _altered(folder: StorePath, name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} in {folder} has changed since it was saved; nothing was exported",
        hint="`safepoint checkpoints verify --deep` lists the faults",
    )
