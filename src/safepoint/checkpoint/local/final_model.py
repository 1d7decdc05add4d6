"""The final model: the model that is published as `final/` when the training has reached its last step.

It is the model as it was when `train()` returned. Safepoint uploads it at once or, where it cannot be streamed,
leaves it in the folder for the uploader. A model that the script saves afterwards, in `final/` or in the output
folder, replaces it.
"""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, commit
from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Describe, FileEntry
from safepoint.checkpoint.format.verify import list_files
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import files

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
        ended_ns: when it ended, by the clock of the output folder's file system.
    """

    describe: Describe
    ended_ns: int


def note_end(output: OutputFolder, describe: Describe) -> TrainingEnd:
    """Record when the training has ended. `adopt_scripts_model` uses only a model that was written after this time.

    Raises:
        OSError: the folder cannot be written.
    """
    mark = output.control / "ended"
    files.write_atomic(mark, b"", durable=False)
    return TrainingEnd(describe, mark.stat().st_mtime_ns)


def adopt_scripts_model(output: OutputFolder, end: TrainingEnd) -> bool:
    """Commit the model that the script has saved after the training, if there is one, as the final model.

    Args:
        output: the folder.
        end: the end of the training.

    Returns:
        Whether there is such a model.

    Raises:
        OSError: the disk is full or gone.
    """
    source, paths = _scripts_model(output.root)
    # An older model belongs to an earlier run in the same folder.
    models = [path for path in paths if path in _MODEL_FILES] or paths
    if not paths or max((source / path).stat().st_mtime_ns for path in models) < end.ended_ns:
        return False
    working = output.work / f"final-{uuid.uuid4().hex}"
    entries: list[FileEntry] = []
    for path in paths:
        target = working / path
        target.parent.mkdir(parents=True, exist_ok=True)
        files.link_or_copy(source / path, target)
        entries.append(FileEntry.of(path, digest_file(target)))
    destination = FolderDestination(working, final_folder(output), trash=output.trash, is_durable=False)
    commit(destination, end.describe(tuple(entries)))
    return True


def _scripts_model(root: Path) -> tuple[Path, list[str]]:
    own = root / FINAL
    if own.is_dir() and not own.is_symlink():
        return own, [path for path, size in list_files(own).items() if size is not None and path != MANIFEST_NAME]
    with os.scandir(root) as entries:
        at_root = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    return root, at_root if any(name in at_root for name in _MODEL_FILES) else []
