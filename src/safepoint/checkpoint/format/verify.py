"""Verifies that a folder holds what its record describes: a checkpoint, or one node's part of a checkpoint.

If each node has an output folder of its own, the part of a node is the files that its folder holds.

Promises: a file that is missing or changed, or is a link, is reported before any byte of the folder is used. Links
are never followed, and nothing outside the folder is opened. Files that the manifest does not name are reported, but
do not make a checkpoint invalid.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    PART_NAME,
    FileEntry,
    Manifest,
    NodePart,
    is_of_newer_release,
)
from safepoint.errors import ManifestError, printable
from safepoint.foundation.files import walk_files
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.foundation.units import ByteCounter

_MISSING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a checkpoint.

    Args:
        file: path within the checkpoint, or `.` for the folder itself.
        reason: what is wrong with it, as the end of a sentence that begins with the file.
    """

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.file)}: {self.reason}"


_LINK = Fault(file=".", reason="the folder is a link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a verification.

    Args:
        manifest: the checkpoint's manifest; None when it cannot be read.
        faults: empty for a valid checkpoint.
        strays: the paths in the folder that the manifest does not name.
    """

    manifest: Manifest | None
    faults: tuple[Fault, ...]
    strays: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the checkpoint may be used."""
        return self.manifest is not None and not self.faults


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        ManifestError: the folder has no manifest, the manifest is a link, or its content is not valid.
    """
    return Manifest.from_bytes(_read_record(folder / MANIFEST_NAME))


def read_part(folder: Path) -> NodePart:
    """Read the record of the part in `folder`.

    Raises:
        ManifestError: the folder has no record, the record is a link, or its content is not valid.
    """
    return NodePart.from_bytes(_read_record(folder / PART_NAME))


def read_manifest_of_any(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. If `folder` holds one node's part: the whole checkpoint's manifest.

    Raises:
        ManifestError: the folder has no valid manifest and no valid record of a part.
    """
    try:
        return read_manifest(folder)
    except ManifestError:
        # Not `Path.is_file`, which raises an error if the folder is unreadable.
        if not os.path.isfile(folder / PART_NAME):
            raise
        return read_part(folder).manifest


def is_newer_format(folder: Path) -> bool:
    """Whether a later release wrote the checkpoint, or the part, in `folder`. Callers do not replace or delete it."""
    for name in (MANIFEST_NAME, PART_NAME):
        with contextlib.suppress(ManifestError):
            if is_of_newer_release(_read_record(folder / name)):
                return True
    return False


def has_record(folder: Path) -> bool:
    """Whether `folder` has a manifest, or a record of a part, that this or a later release can read."""
    for read in (read_manifest, read_part):
        with contextlib.suppress(ManifestError):
            read(folder)
            return True
    return is_newer_format(folder)


def _read_record(path: Path) -> bytes:
    """The bytes of a manifest, or of the record of a part; links are not followed."""
    try:
        return read_regular(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        missing = "there is no manifest, so this is not a checkpoint"
        if path.name == PART_NAME:
            missing = f"there is no {PART_NAME}, so this is not one node's part of a checkpoint"
        raise ManifestError(missing) from error
    except OSError as error:
        reason = "it is a link" if os.path.islink(path) else f"it cannot be read: {error.strerror}"
        raise ManifestError(reason) from error


def verify(folder: Path, *, deep: bool = True, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Compare the folder with its manifest.

    Args:
        folder: a checkpoint.
        deep: whether to read every file and compare its digest, too. If not, only names, kinds and sizes are
            compared.
        progress: called with bytes read so far and bytes in all.
    """
    if folder.is_symlink():
        return Verdict(manifest=None, faults=(_LINK,))
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return Verdict(manifest=None, faults=(Fault(file=MANIFEST_NAME, reason=str(error)),))
    faults, strays = _verify_files(folder, manifest.files, MANIFEST_NAME, deep=deep, progress=progress)
    return Verdict(manifest=manifest, faults=faults, strays=strays)


def verify_part(
    folder: Path, part: NodePart, *, deep: bool = True, progress: Callable[[int, int], None] | None = None
) -> tuple[Fault, ...]:
    """Compare the folder with the record of the node's part, and return the faults. Additional files are ignored.

    Args:
        folder: the folder of the part.
        part: the record that `read_part` returned.
        deep: see `verify`.
        progress: see `verify`.
    """
    if folder.is_symlink():
        return (_LINK,)
    return _verify_files(folder, part.files, PART_NAME, deep=deep, progress=progress)[0]


def has_all_files(folder: Path) -> bool:
    """Whether the files of the checkpoint, or of one node's part of it, exist with the sizes in the manifest."""
    verdict = verify(folder, deep=False)
    if verdict.manifest is None:
        with contextlib.suppress(ManifestError):
            return not verify_part(folder, read_part(folder), deep=False)
    return verdict.is_valid


def _verify_files(
    folder: Path,
    entries: Sequence[FileEntry],
    record_name: str,
    *,
    deep: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[tuple[Fault, ...], tuple[str, ...]]:
    """The faults, and the paths that the record does not name."""
    try:
        found = list_files(folder, skip_unreadable=True)
    except OSError as error:
        return (Fault(file=".", reason=f"it cannot be listed: {error.strerror}"),), ()
    faults = compare_listing(entries, found)
    strays = tuple(sorted(found.keys() - {record_name, *(entry.path for entry in entries)}))
    return tuple(faults if faults or not deep else compare_content(folder, entries, progress)), strays


def list_files(folder: Path, *, skip_unreadable: bool = False) -> dict[str, int | None]:
    """The files in the folder: path → size in bytes, None for links and special files; see `walk_files`.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = walk_files(folder, skip_unreadable=skip_unreadable)
    return {path: status.st_size if stat.S_ISREG(status.st_mode) else None for path, status in found}


def compare_listing(
    entries: Iterable[FileEntry], found: Mapping[str, int | None], *, extra: bool = False
) -> list[Fault]:
    """Compare names, kinds and sizes with a manifest.

    Args:
        entries: the entries of the manifest.
        found: path → size in bytes; None for a link or a special file.
        extra: whether a file that the manifest does not name is a fault.
    """
    faults: list[Fault] = []
    unnamed = dict(found)
    for entry in entries:
        size_bytes = unnamed.pop(entry.path, _MISSING)
        if size_bytes == _MISSING:
            faults.append(Fault(file=entry.path, reason="it is missing"))
        elif size_bytes is None:
            faults.append(Fault(file=entry.path, reason="it is a link or a special file"))
        elif size_bytes != entry.size_bytes:
            reason = f"it has {size_bytes} bytes, the manifest says {entry.size_bytes}"
            faults.append(Fault(file=entry.path, reason=reason))
    if extra:
        faults += [Fault(file=path, reason="it is not in the manifest") for path in unnamed]
    return faults


def compare_content(
    folder: Path, entries: Sequence[FileEntry], progress: Callable[[int, int], None] | None = None
) -> list[Fault]:
    """Read every file and compare its digest with the manifest. The caller has compared names and sizes.

    Args:
        folder: the folder of the checkpoint or part.
        entries: the entries of the manifest.
        progress: called with bytes read so far and bytes in all.
    """
    counter = ByteCounter(progress, sum(entry.size_bytes for entry in entries))
    faults: list[Fault] = []
    for entry in entries:
        try:
            found = digest_file(
                folder / entry.path, counter.add, expected_bytes=entry.size_bytes, expected_parts=entry.parts
            )
        except OSError as error:
            faults.append(Fault(file=entry.path, reason=f"it cannot be read: {error.strerror or error}"))
            continue
        if (found.size_bytes, found.digest) != (entry.size_bytes, entry.digest):
            faults.append(Fault(file=entry.path, reason="its content changed: the digest does not match"))
    return faults
