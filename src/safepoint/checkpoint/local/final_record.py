"""The final model: what the object store gets as `final/` when the training has come to its own end.

It is the model as it was when `train()` returned. Safepoint sends it to the store at once, or, where that cannot be,
lets it wait for the mover in the folder. A script that saves its own, into `final/` or into the output folder itself,
knows better what it wants: then that is taken.
"""

import os
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.checkpoint.local.commit import entry_of
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.upload_record import UploadRecord
from safepoint.foundation import files

FINAL = "final"
_MODEL_FILES = (
    *("config.json", "adapter_config.json", "model.safetensors", "adapter_model.safetensors"),
    *("model.safetensors.index.json", "pytorch_model.bin"),
)


def final_folder(output: OutputFolder) -> Path:
    """Where the final model waits for the mover."""
    return output.control / FINAL


def sent_record(output: OutputFolder) -> UploadRecord:
    """What of the final model is in the store."""
    return UploadRecord(output.control / f"upload-{FINAL}.json")


@dataclass(frozen=True, slots=True)
class TrainingEnd:
    """A training that has come to its own end.

    Args:
        describe: makes a manifest for a model that it has led to.
        ended_ns: when that was, by the clock of the output folder's file system.
    """

    describe: Callable[[tuple[FileEntry, ...]], Manifest]
    ended_ns: int


def note_end(output: OutputFolder, describe: Callable[[tuple[FileEntry, ...]], Manifest]) -> TrainingEnd:
    """What there is in the folder from now on is what the script makes of the training.

    Raises:
        OSError: the folder cannot be written.
    """
    mark = output.control / "ended"
    files.write_atomic(mark, b"", durable=False)
    return TrainingEnd(describe, mark.stat().st_mtime_ns)


def adopt_scripts_model(output: OutputFolder, end: TrainingEnd) -> bool:
    """Let the model that the script has saved by itself wait for the mover, if there is one.

    Args:
        output: the folder.
        end: of the training.

    Returns:
        Whether there is one.

    Raises:
        OSError: the disk is full or gone.
    """
    source, paths = _scripts_model(output.root)
    # Only a model that was written since: an older one belongs to an earlier run in the same folder.
    models = [path for path in paths if path in _MODEL_FILES] or paths
    if not paths or max((source / path).stat().st_mtime_ns for path in models) < end.ended_ns:
        return False
    working = output.work / f"final-{uuid.uuid4().hex}"
    entries: list[FileEntry] = []
    for path in paths:
        target = working / path
        target.parent.mkdir(parents=True, exist_ok=True)
        files.link_or_copy(source / path, target)
        entries.append(entry_of(path, digest_file(target)))
    seal_final(output, working, end.describe(tuple(entries)))
    return True


def seal_final(output: OutputFolder, working: Path, manifest: Manifest) -> None:
    """Make `working`, which holds the files that `manifest` names, the final model that waits for the mover."""
    for entry in manifest.files:
        files.fsync_file(working / entry.path)
    files.write_atomic(working / MANIFEST_NAME, manifest.to_bytes(), durable=True)
    files.publish_folder(working, final_folder(output), trash=output.trash)


def _scripts_model(root: Path) -> tuple[Path, list[str]]:
    own = root / FINAL
    if own.is_dir() and not own.is_symlink():
        return own, _regular(own)
    with os.scandir(root) as entries:
        at_root = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    return root, at_root if any(name in at_root for name in _MODEL_FILES) else []


def _regular(folder: Path) -> list[str]:
    return [
        path for path, status in files.regular_files(folder) if stat.S_ISREG(status.st_mode) and path != MANIFEST_NAME
    ]
