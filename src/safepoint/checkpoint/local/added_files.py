"""Files that were added to a committed checkpoint, by a user's callback for example.

Until its manifest names them, they make the checkpoint invalid. The manifest is replaced in one step.
"""

import dataclasses
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from safepoint.checkpoint.commit import Record, fsync_parents
from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.node_part import read_part
from safepoint.foundation import files


def find_added_files(folder: Path, manifest: Manifest) -> list[FileEntry]:
    """The files in `folder` that the manifest does not name, made durable.

    Raises:
        OSError: a file cannot be read.
    """
    named = {MANIFEST_NAME, PART_NAME, *(entry.path for entry in manifest.files)}
    added: list[FileEntry] = []
    for path, status in files.regular_files(folder):
        if path not in named and stat.S_ISREG(status.st_mode):
            files.fsync_file(folder / path)
            added.append(FileEntry.of(path, digest_file(folder / path)))
    fsync_parents(folder, [entry.path for entry in added])
    return added


def extend_manifest(manifest: Manifest, added: Iterable[FileEntry]) -> Manifest:
    """`manifest` with further files; of two files under one name the first counts.

    Raises:
        ValueError: the manifest would be invalid.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for entry in added:
        entries.setdefault(entry.path, entry)
    return dataclasses.replace(manifest, files=tuple(entries[path] for path in sorted(entries)))


def replace_record(folder: Path, manifest: Manifest, added: Sequence[FileEntry]) -> None:
    """Make the record in `folder`, of a whole checkpoint or of one node's part, name files that were added.

    Args:
        folder: a committed checkpoint, or a part; a part is closed.
        manifest: with the files that all nodes have added.
        added: those in this folder.

    Raises:
        ManifestError: the part in `folder` cannot be read.
        OSError: the record could not be written.
    """
    record: Record = manifest
    if not (folder / MANIFEST_NAME).exists():
        part = read_part(folder)
        paths = sorted({*part.paths, *(entry.path for entry in added)})
        record = dataclasses.replace(part, paths=tuple(paths), manifest=manifest, is_open=False)
    files.write_atomic(folder / record.file_name, record.to_bytes(), durable=True)
