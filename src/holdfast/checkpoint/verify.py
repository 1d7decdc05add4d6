"""Whether a folder is the checkpoint its manifest describes.

Promises: any changed, missing, added or linked file is found before a byte of it is used; links are never
followed, and nothing outside the folder is opened.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.digest import digest_file
from holdfast.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest
from holdfast.errors import ManifestError
from holdfast.foundation.files import regular_files
from holdfast.foundation.units import printable


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification found.

    Args:
        manifest: what the checkpoint says it is; None when that cannot be read.
        faults: empty for a valid checkpoint.
    """

    manifest: Manifest | None
    faults: tuple[Fault, ...]

    @property
    def is_valid(self) -> bool:
        """Whether the checkpoint may be used."""
        return self.manifest is not None and not self.faults


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        ManifestError: no manifest, a link instead of a file, or unacceptable content.
    """
    path = folder / MANIFEST_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ManifestError("there is none, so this is not a checkpoint") from error
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else f"it cannot be read: {error.strerror}"
        raise ManifestError(reason) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # asked first: fdopen refuses a folder, and keeps it open
        os.close(descriptor)
        raise ManifestError("it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise ManifestError(f"it cannot be read: {error.strerror}") from error
    return Manifest.from_bytes(data)


def verify(folder: Path, *, deep: bool = True, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Compare the folder with its manifest.

    Args:
        folder: a checkpoint.
        deep: also read every file and compare its digest; otherwise names, kinds and sizes only.
        progress: called with bytes read so far and bytes in all.
    """
    if folder.is_symlink():
        return Verdict(manifest=None, faults=(Fault(file=".", reason="the folder is a link"),))
    try:
        manifest = read_manifest(folder)
        found = {
            path: status.st_size if stat.S_ISREG(status.st_mode) else None
            for path, status in regular_files(folder)
            if path != MANIFEST_NAME
        }
    except ManifestError as error:
        return Verdict(manifest=None, faults=(Fault(file=MANIFEST_NAME, reason=str(error)),))
    except OSError as error:
        reason = f"it cannot be listed: {error.strerror}"
        return Verdict(manifest=None, faults=(Fault(file=".", reason=reason),))
    faults = [_compare(entry, found) for entry in manifest.files]
    named = {entry.path for entry in manifest.files}
    extra = [Fault(file=path, reason="it is not in the manifest") for path in found if path not in named]
    shallow = (*(fault for fault in faults if fault), *extra)
    if shallow or not deep:
        return Verdict(manifest=manifest, faults=shallow)
    return Verdict(manifest=manifest, faults=tuple(_compare_content(folder, manifest, progress)))


def _compare(entry: FileEntry, found: dict[str, int | None]) -> Fault | None:
    if entry.path not in found:
        return Fault(file=entry.path, reason="it is missing")
    size_bytes = found[entry.path]
    if size_bytes is None:
        return Fault(file=entry.path, reason="it is a link or a special file")
    if size_bytes != entry.size_bytes:
        return Fault(file=entry.path, reason=f"it has {size_bytes} bytes, the manifest says {entry.size_bytes}")
    return None


def _compare_content(folder: Path, manifest: Manifest, progress: Callable[[int, int], None] | None) -> list[Fault]:
    total_bytes = manifest.size_bytes
    done_bytes = 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        if progress is not None:
            progress(done_bytes, total_bytes)

    faults: list[Fault] = []
    for entry in manifest.files:
        try:
            found = digest_file(folder / entry.path, advance)
        except OSError as error:
            faults.append(Fault(file=entry.path, reason=f"it cannot be read: {error.strerror or error}"))
            continue
        if (found.size_bytes, found.digest) != (entry.size_bytes, entry.digest):
            faults.append(Fault(file=entry.path, reason="its content changed: the digest does not match"))
    return faults


__all__ = ["Fault", "Verdict", "read_manifest", "verify"]
