"""The model alone, out of checkpoints that hold it in pieces: torch.distributed.checkpoint and DeepSpeed's ZeRO.

Written by Holdfast or not. Nothing is loaded: bytes go from file to file, a stretch at a time.
"""

import contextlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path

from holdfast.checkpoint import copying
from holdfast.checkpoint.copying import Progress
from holdfast.checkpoint.digest import digest_file
from holdfast.checkpoint.manifest import MANIFEST_NAME
from holdfast.checkpoint.verify import read_manifest
from holdfast.checkpoint.weights.dcp_weights import METADATA, dcp_weights
from holdfast.checkpoint.weights.gathering import write_weights
from holdfast.checkpoint.weights.weight import StoredWeight
from holdfast.checkpoint.weights.zero_weights import zero_folder, zero_weights
from holdfast.errors import CheckpointError, ConflictError, StorageError
from holdfast.foundation import files
from holdfast.foundation.units import ByteCounter, format_bytes
from holdfast.storage.location import Location, Scheme
from holdfast.storage.opening import open_store
from holdfast.storage.store import Store

_DCP_FOLDERS = (".", "pytorch_model_fsdp_0", "sharded", "model")
_BESIDE = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|vocab\..*|merges\.txt|chat_template\..*"
    r"|preprocessor_config\.json|processor_config\.json|.*\.model"
)
"""Small files that belong to a model."""
_ROOM = 64 << 20


def is_in_pieces(folder: Path) -> bool:
    """Whether a folder holds a model in pieces, and not as a whole besides."""
    if not folder.is_dir() or any(copying.WEIGHTS.fullmatch(path.name) for path in folder.iterdir()):
        return False
    return _dcp_folder(folder) is not None or zero_folder(folder) is not None


def _dcp_folder(folder: Path) -> Path | None:
    return next((folder / name for name in _DCP_FOLDERS if (folder / name / METADATA).is_file()), None)


def export_pieces(folder: Path, target: Location, *, progress: Progress | None = None) -> list[str]:
    """Write the model in `folder` as `from_pretrained` reads it.

    Args:
        folder: see `is_in_pieces`.
        target: a folder or a prefix in which there is nothing yet.
        progress: see `copying.Progress`.

    Returns:
        The files, sorted.

    Raises:
        CheckpointError: it is damaged.
        ConflictError: there is something at the target.
        StorageError: a store cannot be used, or the disk has too little room.
    """
    store = open_store(target)
    if next(iter(store.list()), None) is not None:
        raise ConflictError(f"{target} is not empty; nothing was exported", hint="name a new place")
    with contextlib.ExitStack() as lease:
        if (folder / MANIFEST_NAME).is_file():  # or retention of a running training takes it away meanwhile
            lease.enter_context(files.reading(folder / MANIFEST_NAME))
        return _export(folder, target, store, progress)


def _export(folder: Path, target: Location, store: Store, progress: Progress | None) -> list[str]:
    try:
        weights = _weights(folder)
        size_bytes = sum(weight.shape.num_bytes for weight in weights)
        if target.scheme is Scheme.FILE:
            place = target.folder.absolute()
            place.parent.mkdir(parents=True, exist_ok=True)
            with _appearing(place) as working:
                return _fill(folder, weights, working, ByteCounter(progress, size_bytes))
        counter = ByteCounter(progress, 2 * size_bytes)
        with tempfile.TemporaryDirectory(prefix="holdfast-export-") as staging:
            paths = _fill(folder, weights, Path(staging), counter)
            for path in paths:
                store.upload(path, Path(staging) / path, progress=counter.add)
            return paths
    except OSError as error:
        raise StorageError(f"the model cannot be exported: {error}") from error


def _weights(folder: Path) -> list[StoredWeight]:
    _check_files(folder)
    dcp, zero = _dcp_folder(folder), zero_folder(folder)
    if dcp is None and zero is None:
        raise CheckpointError(f"{folder} holds no model in pieces")
    try:
        weights = dcp_weights(dcp) if dcp is not None else zero_weights(zero) if zero is not None else []
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever hostile content makes of it
        raise CheckpointError(f"{folder} is not laid out in a way that is known here: {error!r}") from error
    if len({weight.shape.name for weight in weights}) != len(weights):
        raise CheckpointError(f"two weights in {folder} have one name; nothing was exported")
    if (folder / MANIFEST_NAME).is_file():
        _verify(folder, dcp or zero or folder, weights)
    return weights


def _check_files(folder: Path) -> None:
    """Refuse what is not the checkpoint's own, and what would be half of it."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is a link or a special file; nothing was exported")
    if (folder / "pytorch_model_fsdp_1").exists():
        raise CheckpointError(f"{folder} holds several models, and one of them is meant; nothing was exported")


def _verify(folder: Path, pieces: Path, weights: Sequence[StoredWeight]) -> None:
    """Compare what is going to be read with the manifest."""
    manifest = read_manifest(folder)
    if manifest.base is not None:
        raise CheckpointError(
            f"{folder} holds adapters of {manifest.base['name'] or 'a model without a name'}, in pieces; "
            "nothing was exported",
            hint="resume from it, and save the model from there",
        )
    entries = {folder / entry.path: entry for entry in manifest.files}
    read = {run.path for weight in weights for run in weight.runs} | {pieces / METADATA}
    for path in sorted(path for path in read if path.exists()):
        entry = entries.get(path)
        if entry is None or digest_file(path).digest != entry.digest:
            raise CheckpointError(
                f"{path.relative_to(folder)} is not what was saved; nothing was exported",
                hint="see `holdfast checkpoints verify --deep`",
            )


def _fill(folder: Path, weights: Sequence[StoredWeight], working: Path, counter: ByteCounter) -> list[str]:
    needed = sum(weight.shape.num_bytes for weight in weights) + _ROOM
    free = shutil.disk_usage(working).free
    if free < needed:
        raise StorageError(
            f"{working.parent} has {format_bytes(free)} free, the model needs {format_bytes(needed)}; "
            "nothing was exported"
        )
    paths = write_weights(weights, working, progress=counter.add)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink() and _BESIDE.fullmatch(path.name):
            shutil.copyfile(path, working / path.name)
            paths.append(path.name)
    return sorted(paths)


@contextlib.contextmanager
def _appearing(folder: Path) -> Generator[Path]:
    """A working folder that becomes `folder` when all is well, and is gone otherwise."""
    working = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    working.mkdir()
    try:
        yield working
        for path in working.iterdir():
            files.fsync_file(path)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # it is empty
        working.rename(folder)
        files.fsync_folder(folder.parent)
    finally:
        files.delete_tree(working)


__all__ = ["export_pieces", "is_in_pieces"]
