"""Checkpoints that a run has passed over and could not move aside.

A run that resumes from an older checkpoint moves newer checkpoints aside. Otherwise the next start would resume from
one of them, because the checkpoint with the highest step counts as the newest. A checkpoint that cannot be moved (an
immutable folder, a mount point) is noted in `.safepoint/passed-over.json` instead. From then on, no start resumes
from this checkpoint, retention does not count it, and it is not uploaded.

The note contains the digest of the manifest. If the folder holds one node's part of a checkpoint, the note contains
the digest of `safepoint-part.json` instead. If the folder has neither file, the note contains an empty text. A new
checkpoint of Safepoint under the same name has another digest, so the new checkpoint is not passed over.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, PART_NAME
from safepoint.foundation import files
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.shared_folders.opening import read_regular

NOTES_NAME = "passed-over.json"
_NO_RECORD = ""


def read_notes(control: Path) -> dict[str, str]:
    """The noted names, each with the digest of the manifest or of `safepoint-part.json`, or with an empty text.

    The result is empty if there is no valid file of notes.

    Args:
        control: the folder `.safepoint`.
    """
    with contextlib.suppress(OSError, ValueError):
        notes = read_object(control / NOTES_NAME)
        return {name: digest for name, digest in notes.items() if isinstance(digest, str)}
    return {}


def is_noted(folder: Path, notes: Mapping[str, str]) -> bool:
    """Whether `notes` name the checkpoint `folder`, and the digest in the note is still correct."""
    return folder.name in notes and notes[folder.name] == _digest_of_record(folder)


def add_notes(control: Path, folders: Iterable[Path]) -> None:
    """Add the checkpoints `folders` to the notes, durably. If a checkpoint no longer exists, its note is deleted.

    Raises:
        OSError: the file cannot be written.
    """
    notes = {name: digest for name, digest in read_notes(control).items() if _is_there(control.parent, name)}
    notes |= {folder.name: _digest_of_record(folder) for folder in folders}
    files.write_atomic(control / NOTES_NAME, json.dumps(notes).encode(), durable=True)


def _is_there(root: Path, name: str) -> bool:
    return step_of(Path(name)) is not None and os.path.lexists(root / name)


def _digest_of_record(folder: Path) -> str:
    for name in (MANIFEST_NAME, PART_NAME):
        with contextlib.suppress(OSError):
            return digest_bytes(read_regular(folder / name, MAX_MANIFEST_BYTES))
    return _NO_RECORD
