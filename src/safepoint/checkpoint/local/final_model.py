"""The final model: the model that is published as `final/` when the training has reached its last step.

The final model is the model as it was when `train()` returned. Safepoint uploads it at once. If it cannot be
streamed, Safepoint leaves it in `.safepoint/final/` for the uploader. If the script then saves a model of its own, in
`final/` or in the output folder, the script's model is published instead.
"""

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, commit, link_or_copy
from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Describe, FileEntry
from safepoint.checkpoint.format.verify import list_files
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.ownership import is_of_stranger

FINAL = "final"
_MODEL_FILES = (
    *("config.json", "adapter_config.json", "model.safetensors", "adapter_model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin"),
)


def final_folder(output: OutputFolder) -> Path:
    """Where the uploader finds the final model."""
    return output.control / FINAL


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """The end of a training that has reached its last step.

    Args:
        describe: makes the manifest of the model.
        earlier: the files in the output folder and in `final/` when the training ended, each with its `_stamp`.
    """

    describe: Describe
    earlier: Mapping[Path, tuple[int, ...]]


def note_end(output: OutputFolder, describe: Describe) -> TrainingEnd:
    """Record the files that exist when the training ends. `adopt_scripts_model` uses only a model written later.

    Raises:
        OSError: the folder cannot be read.
    """
    root = output.root
    paths = [root / name for name in _at_root(root)] + [root / FINAL / path for path in _in_final(root) or []]
    return TrainingEnd(describe, {path: _stamp(path) for path in paths})


def adopt_scripts_model(output: OutputFolder, end: TrainingEnd) -> bool:
    """If the script has saved a model after the training, commit it as the final model.

    Args:
        output: the folder.
        end: the end of the training.

    Returns:
        Whether the script has saved a model.

    Raises:
        SafepointError: see `commit`.
        OSError: the disk is full or gone.
    """
    source, paths = _scripts_model(output.root, end)
    if not paths:
        return False
    working = output.work / f"final-{uuid.uuid4().hex}"
    entries: list[FileEntry] = []
    for path in paths:
        target = working / path
        no_links.make_folders(target.parent)
        link_or_copy(source / path, target)
        # If the file grows while it is read, its entry has another size than the file, and the commit fails.
        entries.append(FileEntry.of(path, digest_file(target, expected_bytes=target.lstat().st_size)))
    destination = FolderDestination(working, final_folder(output), trash=output.trash, is_durable=False)
    commit(destination, end.describe(tuple(entries)))
    return True


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes when the file is written. Compare it for equality only: clocks may be set back."""
    status = path.stat(follow_symlinks=False)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _scripts_model(root: Path, end: TrainingEnd) -> tuple[Path, list[str]]:
    """The folder and the files of a model that was saved after the training; no files if there is none."""
    at_root = _at_root(root)
    candidates = [(root / FINAL, _in_final(root) or [])]
    candidates += [(root, at_root)] if any(name in at_root for name in _MODEL_FILES) else []
    for source, paths in candidates:
        # If no file of a model was written after the training, the model belongs to an earlier run in this folder.
        models = [path for path in paths if path in _MODEL_FILES] or paths
        if any(end.earlier.get(source / path) != _stamp(source / path) for path in models):
            return source, paths
    return root, []


def _in_final(root: Path) -> list[str] | None:
    own = root / FINAL
    if own.is_symlink() or not own.is_dir() or is_of_stranger(own):
        return None
    return [path for path, size in list_files(own).items() if size is not None and path != MANIFEST_NAME]


def _at_root(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    # In a folder to which everyone may write, another user may have put files there.
    return sorted(name for name in names if not is_of_stranger(root / name))
