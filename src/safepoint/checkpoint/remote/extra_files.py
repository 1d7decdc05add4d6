"""The files that a program leaves in the output folder beside its checkpoints: plots, metrics, a model of its own.

The files are uploaded under the same names, after the checkpoints, when the program or the attempt ends. They belong
to no checkpoint: no manifest lists them, and a later attempt that writes a file of the same name replaces the object.
Promises: at most the given number of bytes is uploaded, smallest files first. Files that are left out are reported.
"""

import contextlib
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.final_model import FINAL, final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.errors import ManifestError, ObjectNotFoundError, printable
from safepoint.foundation import clock
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import ExtraFilesLeftOut, ExtraFilesUploaded
from safepoint.foundation.shared_folders.no_links import CONTROL
from safepoint.foundation.units import format_bytes
from safepoint.storage.store import is_key

_NUM_THREADS = 4
_NOT_AT_ROOT = {FINAL, "cloud-upload-staging"}
_CACHES = {".cache", "__pycache__", ".ipynb_checkpoints", ".locks"}
_IMAGE = re.compile(r"image-[0-9]+")
IMAGE_RECORD = "image.json"
"""A folder `image-N` that has this file is a process image. It holds the memory of processes, with all passwords."""
_PREFIXES = ("set-aside-", "tmp-checkpoint-")
_WEIGHTS = (".safetensors", ".bin")


class ExtraFiles:
    """The extra files of one output folder.

    Args:
        output: the folder.
        remote: the location in the store, which this attempt has claimed for itself.
        limit_bytes: how many bytes to upload at most; 0 uploads nothing.
        is_first_node: whether this is the folder of node 0. Another node uploads a file only if the store has no file
            of this name yet.
        report: receives the events.
    """

    def __init__(
        self,
        output: OutputFolder,
        remote: RemoteFolder,
        *,
        limit_bytes: int,
        is_first_node: bool,
        report: Callable[[Event], None],
    ) -> None:
        self._output = output
        self._remote = remote
        self._limit_bytes = limit_bytes
        self._is_first_node = is_first_node
        self._report = report
        self._sent: dict[str, tuple[int, int]] = {}

    def upload(self, *, progress: Callable[[int], None], deadline_s: float | None) -> None:
        """Upload the files. After a failure the caller may call it again, to continue.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: an upload failed.
        """
        if not self._limit_bytes:
            return
        chosen, left_out = self._choose()
        started_s = clock.monotonic_s()

        def send(file: tuple[str, tuple[int, int]]) -> int | None:
            path, stamp = file
            is_sent = self._sent.get(path) == stamp or self._send(path, progress, deadline_s)
            self._sent[path] = stamp
            return stamp[0] if is_sent else None

        is_new = any(self._sent.get(path) != stamp for path, stamp in chosen)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-upload") as threads:
            sizes = [size for size in threads.map(send, chosen) if size is not None]
        where = str(self._remote.store.location)
        if sizes and is_new:
            duration_s = round(clock.monotonic_s() - started_s, 3)
            event = ExtraFilesUploaded(
                num_files=len(sizes), location=where, size_bytes=sum(sizes), duration_s=duration_s
            )
            self._report(event)
        if left_out:
            limit = format_bytes(self._limit_bytes)
            reason = f"together they exceed the limit of {limit}, or their names are not valid in a store"
            self.report_left_out(reason, left_out)

    def report_left_out(self, reason: str, names: list[str] | None = None) -> None:
        """Report that files are not uploaded.

        Args:
            reason: why.
            names: the names of the files; None for all files that are not uploaded yet.
        """
        if names is None:
            chosen, _ = self._choose()
            names = [path for path, stamp in chosen if self._sent.get(path) != stamp]
        if names:
            example = printable(names[0])
            folder, where = str(self._output.root), str(self._remote.store.location)
            self._report(
                ExtraFilesLeftOut(num_files=len(names), example=example, folder=folder, location=where, reason=reason)
            )

    def _send(self, path: str, progress: Callable[[int], None], deadline_s: float | None) -> bool:
        store = self._remote.store
        if not self._is_first_node:
            with contextlib.suppress(ObjectNotFoundError):
                store.stat(path, deadline_s=deadline_s)
                return False
        root = Path(os.path.realpath(self._output.root))
        source = _place_in(root, path)
        # The file was deleted since it was listed, or replaced by a link that leads out of the folder.
        if source is None:
            return False
        # From here on no link is followed: another user may replace the file, or a folder above it, at any time.
        file = SourceFile(path=path, source=source, below=root)
        fence = self._remote.fence
        upload_verified(
            store, path, file, fence=lambda: fence(deadline_s=deadline_s), progress=progress, deadline_s=deadline_s
        )
        return True

    def _choose(self) -> tuple[list[tuple[str, tuple[int, int]]], list[str]]:
        """The files to upload, each with its size and time of change; and the names of the files to leave out."""
        published = self._published_weights()
        found = sorted(self._files(), key=lambda file: (file[1][0], file[0]))
        chosen: list[tuple[str, tuple[int, int]]] = []
        left_out: list[str] = []
        total_bytes = 0
        for path, stamp in found:
            if published.get(path) == stamp[0]:
                continue
            total_bytes += stamp[0]
            if total_bytes > self._limit_bytes or not is_key(path):
                left_out.append(path)
            else:
                chosen.append((path, stamp))
        return chosen, left_out

    def _published_weights(self) -> dict[str, int]:
        """The weights in the output folder itself that are uploaded as the final model: name → size in bytes."""
        try:
            entries = read_manifest(final_folder(self._output)).files
        except (OSError, ManifestError):
            return {}
        return {entry.path: entry.size_bytes for entry in entries if entry.path.endswith(_WEIGHTS)}

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        root = os.path.realpath(self._output.root)
        for folder, folders, names in os.walk(root):
            below = os.path.relpath(folder, root)
            prefix = "" if below == "." else f"{below}/"
            folders[:] = sorted(name for name in folders if not _is_skipped(name, is_at_root=not prefix))
            for name in names:
                source = _place_in(Path(root), f"{prefix}{name}")
                if source is not None:
                    with contextlib.suppress(FileNotFoundError):
                        status = source.lstat()
                        yield f"{prefix}{name}", (status.st_size, status.st_mtime_ns)


def private_patterns(folder: Path) -> Iterator[str]:
    """Patterns, as for `fnmatch`, for the files below an output folder that must never be uploaded.

    These are the files in `.safepoint` and in process images, at any depth, and links to them.
    """
    root = Path(os.path.realpath(folder))
    for place, folders, names in os.walk(root):
        below = Path(place).relative_to(root)
        private = {name for name in folders if _is_private(root, below / name / "file")}
        yield from (f"{glob.escape(str(below / name))}/*" for name in sorted(private))
        folders[:] = [name for name in folders if name not in private]
        for path in (below / name for name in names if os.path.islink(root / below / name)):
            target = Path(os.path.realpath(root / path))
            if target.is_relative_to(root) and _is_private(root, target.relative_to(root)):
                yield glob.escape(str(path))


def _place_in(root: Path, path: str) -> Path | None:
    """The regular file to which `path` leads; None if it is outside of `root`, in `.safepoint` or in a process image.

    A link may lead out of the folder or into `.safepoint`, to files that are not the program's output.
    """
    place = Path(os.path.realpath(root / path))
    if not place.is_relative_to(root) or _is_private(root, Path(path)) or _is_private(root, place.relative_to(root)):
        return None
    with contextlib.suppress(OSError):
        return place if stat.S_ISREG(place.lstat().st_mode) else None
    return None


def _is_private(root: Path, path: Path) -> bool:
    return any(
        above.name == CONTROL or (_IMAGE.fullmatch(above.name) and (root / above / IMAGE_RECORD).exists())
        for above in path.parents
    )


def _is_skipped(folder: str, *, is_at_root: bool) -> bool:
    if folder in _CACHES or folder == CONTROL or step_of(Path(folder)) is not None:
        return True
    return is_at_root and (folder in _NOT_AT_ROOT or folder.startswith(_PREFIXES))
