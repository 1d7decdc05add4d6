"""The model alone, out of checkpoints that hold it in pieces: torch.distributed.checkpoint and DeepSpeed's ZeRO.

Written by Holdfast or not. Nothing is loaded: bytes go from file to file, a stretch at a time.
"""

import contextlib
import re
import shutil
import stat
from collections.abc import Sequence
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
from holdfast.errors import CheckpointError, StorageError
from holdfast.foundation import files
from holdfast.foundation.units import ByteCounter, format_bytes
from holdfast.storage.location import Location

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
    with contextlib.ExitStack() as lease:
        if (folder / MANIFEST_NAME).is_file():  # or retention of a running training takes it away meanwhile
            lease.enter_context(files.reading(folder / MANIFEST_NAME))
        try:
            weights = _weights(folder)
            size_bytes = sum(weight.shape.num_bytes for weight in weights)

            def fill(working: Path, counter: ByteCounter) -> list[str]:
                return _fill(folder, weights, working, counter)

            return copying.deliver(target, size_bytes, fill, beside=None, progress=progress)
        except OSError as error:
            raise StorageError(f"the model cannot be exported: {error}") from error


def _weights(folder: Path) -> list[StoredWeight]:
    _check_files(folder)
    pieces, find = _dcp_folder(folder), dcp_weights
    if pieces is None:
        pieces, find = zero_folder(folder), zero_weights
    if pieces is None:
        raise CheckpointError(f"{folder} holds no model in pieces")
    if (folder / MANIFEST_NAME).is_file():
        _check_manifest(folder, pieces)
    try:
        weights = find(pieces)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # whatever hostile content makes of it
        raise CheckpointError(f"{folder} is not laid out in a way that is known here: {error!r}") from error
    if len({weight.shape.name for weight in weights}) != len(weights):
        raise CheckpointError(f"two weights in {folder} have one name; nothing was exported")
    return weights


def _check_files(folder: Path) -> None:
    """Refuse what is not the checkpoint's own, and what would be half of it."""
    for path, status in files.regular_files(folder):
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} in {folder} is a link or a special file; nothing was exported")
    if (folder / "pytorch_model_fsdp_1").exists():
        raise CheckpointError(f"{folder} holds several models, and one of them is meant; nothing was exported")


def _check_manifest(folder: Path, pieces: Path) -> None:
    """Refuse adapters, and compare every file that is going to be read with the manifest."""
    manifest = read_manifest(folder)
    if manifest.base is not None:
        raise CheckpointError(
            f"{folder} holds adapters of {manifest.base['name'] or 'a model without a name'}, in pieces; "
            "nothing was exported",
            hint="resume from it, and save the model from there",
        )
    digests = {entry.path: entry.digest for entry in manifest.files}
    for path, _ in files.regular_files(pieces):
        name = (pieces / path).relative_to(folder).as_posix()
        if name != MANIFEST_NAME and digests.get(name) != digest_file(pieces / path).digest:
            raise CheckpointError(
                f"{name} in {folder} is not what was saved; nothing was exported",
                hint="see `holdfast checkpoints verify --deep`",
            )


def _fill(folder: Path, weights: Sequence[StoredWeight], working: Path, counter: ByteCounter) -> list[str]:
    working.mkdir()
    needed = sum(weight.shape.num_bytes for weight in weights) + _ROOM
    free = shutil.disk_usage(working).free
    if free < needed:
        raise StorageError(
            f"{working.parent} has {format_bytes(free)} free, the model needs {format_bytes(needed)}; "
            "nothing was exported"
        )
    paths = write_weights(weights, working, progress=counter.add)
    for path in folder.iterdir():
        if path.is_file() and _BESIDE.fullmatch(path.name):
            shutil.copyfile(path, working / path.name)
            paths.append(path.name)
    for name in paths:
        files.fsync_file(working / name)
    return sorted(paths)


__all__ = ["export_pieces", "is_in_pieces"]
