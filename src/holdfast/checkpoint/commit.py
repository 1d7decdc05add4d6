"""From the files of all ranks to one checkpoint: absent or complete, never in between.

The protocol (docs/commit.md):

1. every rank writes into a folder of its own below `.holdfast/work/<attempt>/checkpoint-<step>/`;
2. every rank seals its part: each file fsynced, digested and moved into the merged folder;
3. the first rank collects the parts, fsyncs the folders, writes the manifest, fsyncs it, and gives the merged
   folder its final name with one rename, which is the commit;
4. everybody hears the verdict.

A crash before the rename leaves nothing but a working folder, and the next owner of the output folder
deletes it; a crash after it leaves a complete checkpoint.
"""

import contextlib
import dataclasses
import json
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.checkpoint.catalog import checkpoint_name, list_checkpoints, step_of
from holdfast.checkpoint.digest import FileDigest, digest_file
from holdfast.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.checkpoint.retention import Candidate, Policy, select_superseded
from holdfast.checkpoint.verify import read_manifest
from holdfast.errors import ConflictError, ManifestError, SaveError, StorageError
from holdfast.foundation import clock, files
from holdfast.foundation.files import FolderLock

_CONTROL = ".holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank contributes to a checkpoint, or why it cannot.

    Args:
        rank: who.
        files: what it wrote, already in the merged folder.
        error: why its part is missing; None when it is there.
    """

    rank: int
    files: tuple[FileEntry, ...] = ()
    error: str | None = None


class OutputFolder:
    """The folder a run writes to: checkpoints by name, and Holdfast's own files under `.holdfast/`.

    Args:
        root: the folder; need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.control = root / _CONTROL
        self.work = self.control / "work"
        self.trash = self.control / "trash"
        self.events = self.control / "events.jsonl"
        self.progress = self.control / "progress.json"
        self._lock: FolderLock | None = None

    def check_usable(self) -> None:
        """Whether the folder can exist; cheap, creates the folder and nothing in it.

        Raises:
            StorageError: it cannot be created, or is a file.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StorageError:
        is_file = isinstance(error, NotADirectoryError | FileExistsError)
        return StorageError(
            f"the output folder {self.root} {'is not a folder' if is_file else 'cannot be used'}: {error.strerror}; "
            "training was not started",
            hint="name a writable folder with --output-dir",
        )

    def prepare(self) -> None:
        """Create what is missing and prove that it can be written.

        Raises:
            StorageError: it cannot be created or written.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            self.trash.mkdir(exist_ok=True)
            probe = self.control / "writable"
            files.write_atomic(probe, b"", durable=False)
            probe.unlink()
        except OSError as error:
            raise self._unusable(error) from error

    def claim(self, owner: dict[str, Any], *, wait_s: float, waiting: Callable[[str], None]) -> bool:
        """Become the one writer, waiting for one that is just leaving.

        Args:
            owner: who we are, for whoever is refused.
            wait_s: how long a leaving writer may take.
            waiting: told once who is being waited for.

        Returns:
            Whether the file system has locks; without them nothing is cleaned up.

        Raises:
            ConflictError: another run still holds the folder.
        """
        path = self.control / "lock"
        deadline = clock.monotonic_s() + wait_s
        told = False
        while True:
            try:
                self._lock = FolderLock.acquire(path, owner)
            except BlockingIOError as error:
                holder = files.read_lock_owner(path)
                who = f"pid {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('since', '?')}"
                if clock.monotonic_s() >= deadline:
                    raise ConflictError(
                        f"{self.root} is in use by another run ({who}); nothing was changed",
                        hint="stop that run first, or name another output folder",
                    ) from error
                if not told:
                    waiting(who)
                    told = True
                clock.sleep(0.2)
            else:
                return self._lock is not None

    def release(self, attempt_id: str | None = None) -> None:
        """Let the next run in; the attempt's own working folder is deleted while the lock is still held."""
        if attempt_id is not None and self._lock is not None:
            files.delete_tree(self.work / attempt_id)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clean(self) -> int:
        """Delete the working folders of dead runs; call it only after `claim` returned True.

        Returns:
            How many were deleted.
        """
        leftovers = [*self.work.iterdir(), *self.trash.iterdir()]
        leftovers += self.control.glob(".*.????????????????????????????????")
        for path in leftovers:
            files.delete_tree(path)
        return len(leftovers)

    def next_attempt(self, run_id: str, *, after: int) -> int:
        """Count one more start of the run; call it while holding the folder.

        Args:
            run_id: the run.
            after: the attempt that wrote the checkpoint to go on from, 0 for none.
        """
        path = self.control / "attempt.json"
        counted = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            counted = int(record["attempt"]) if record["run_id"] == run_id else 0
        attempt = max(counted, after) + 1
        files.write_atomic(path, json.dumps({"run_id": run_id, "attempt": attempt}).encode(), durable=True)
        return attempt

    def open_attempt(self, attempt_id: str) -> None:
        """Create the working folder of this start; its sight tells other nodes that they share the folder."""
        (self.work / attempt_id).mkdir()

    def sees_attempt(self, attempt_id: str, *, wait_s: float) -> bool:
        """Whether this node sees what the first rank created, allowing for a network file system's caches."""
        deadline = clock.monotonic_s() + wait_s
        while not (self.work / attempt_id).is_dir():
            if clock.monotonic_s() >= deadline:
                return False
            clock.sleep(0.2)
        return True

    def committed(self) -> list[Path]:
        """Every folder with a manifest that can be read, newest first; contents are not verified."""
        return [path for path, _ in self.manifests()]

    def manifests(self) -> list[tuple[Path, Manifest]]:
        """Every folder with a manifest that can be read, and the manifest, newest first; see `committed`."""
        found: list[tuple[Path, Manifest]] = []
        for path in list_checkpoints(self.root):
            with contextlib.suppress(ManifestError):
                if not path.is_symlink():
                    found.append((path, read_manifest(path)))
        return found

    def superseded(self, policies: Sequence[Policy], *, protected: Collection[int] = ()) -> list[Path]:
        """The checkpoints that no policy keeps, oldest first; see `select_superseded`."""
        candidates = {
            step: Candidate.of(manifest)
            for path, manifest in self.manifests()
            if (step := step_of(path)) == manifest.step
        }
        steps = select_superseded(list(candidates.values()), policies, now_s=clock.wall_s(), protected=protected)
        return [self.root / checkpoint_name(step) for step in steps]

    def prune(self, paths: Sequence[Path]) -> list[Path]:
        """Delete checkpoints in one visible step each, except those that somebody is reading or uploading.

        Returns:
            Those that were deleted.
        """
        pruned: list[Path] = []
        for path in paths:
            if not files.is_being_read(path / MANIFEST_NAME):
                files.discard(path, trash=self.trash)
                pruned.append(path)
        return pruned


class WorkingCheckpoint:
    """A checkpoint in the making.

    Args:
        output: where it is to appear.
        attempt_id: names this start of the run, so that a zombie of an earlier one writes elsewhere.
        step: optimizer steps done.
        target: where it is to appear instead of `checkpoint-<step>`.
    """

    def __init__(self, output: OutputFolder, *, attempt_id: str, step: int, target: Path | None = None) -> None:
        self.target = target or output.root / checkpoint_name(step)
        self.name = self.target.name
        self._output = output
        self._root = output.work / attempt_id / self.name
        self._merged = self._root / "merged"

    def rank_root(self, rank: int) -> Path:
        """Where rank `rank` lets its framework write: it creates `<rank_root>/checkpoint-<step>/`."""
        root = self._root / f"rank-{rank}"
        (root / self.name).mkdir(parents=True, exist_ok=True)
        return root

    def seal(self, rank: int) -> Part:
        """Make what `rank` wrote durable and move it into the merged folder.

        Raises:
            SaveError: it wrote a link or a special file.
            OSError: the disk is full, gone, or read-only.
        """
        source = self._root / f"rank-{rank}" / self.name
        entries: list[FileEntry] = []
        for path, status in files.regular_files(source):
            if not stat.S_ISREG(status.st_mode):
                raise SaveError(f"{path} is a link or a special file, which a checkpoint cannot hold")
            files.fsync_file(source / path)
            entries.append(entry_of(path, digest_file(source / path)))
        for entry in entries:
            destination = self._merged / entry.path
            destination.parent.mkdir(parents=True, exist_ok=True)
            (source / entry.path).rename(destination)
        return Part(rank=rank, files=tuple(entries))

    def commit(self, parts: Sequence[Part], describe: Callable[[tuple[FileEntry, ...]], Manifest]) -> Manifest:
        """Make the sealed parts one checkpoint; the first rank does it, once, after all have sealed.

        Args:
            parts: one for each rank.
            describe: makes the manifest for the files, sorted by path.

        Raises:
            SaveError: a part is missing, two ranks wrote different content under one name, or the whole is not
                a checkpoint.
            OSError: the disk is full, gone, or read-only.
        """
        broken = [f"rank {part.rank}: {part.error}" for part in parts if part.error is not None]
        if broken:
            raise SaveError("; ".join(broken))
        entries: dict[str, FileEntry] = {}
        for part in parts:
            for entry in part.files:
                if entries.setdefault(entry.path, entry) != entry:
                    raise SaveError(f"two ranks wrote {entry.path} with different content")
        try:
            manifest = describe(tuple(entries[path] for path in sorted(entries)))
        except ValueError as error:
            raise SaveError(f"no manifest can say what the ranks wrote: {error}") from error
        present = {path: status.st_size for path, status in files.regular_files(self._merged)}
        if present != {entry.path: entry.size_bytes for entry in manifest.files}:
            raise SaveError(f"the files in {self._merged} are not those that the ranks reported")
        _fsync_folders(self._merged, present)
        files.write_atomic(self._merged / MANIFEST_NAME, manifest.to_bytes(), durable=True)
        files.publish_folder(self._merged, self.target, trash=self._output.trash)
        return manifest

    def discard(self) -> None:
        """Delete what is left of the working folder, after the commit or instead of it."""
        files.delete_tree(self._root)


def entry_of(path: str, found: FileDigest) -> FileEntry:
    """What a manifest says of a file whose digest was taken."""
    return FileEntry(path=path, size_bytes=found.size_bytes, digest=found.digest, parts=found.parts)


def _fsync_folders(root: Path, paths: Iterable[str]) -> None:
    """Make the names of `paths` survive a power loss, up to and without those in `root` itself."""
    parents = {parent for path in paths for parent in PurePosixPath(path).parents}
    for parent in sorted(parents - {PurePosixPath()}, reverse=True):
        files.fsync_folder(root / parent)


def reseal(folder: Path, manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Name files that were added to a committed checkpoint, by a callback of the user's for example.

    The manifest is replaced in one step; until then the added files make the checkpoint invalid, and a crash in
    between means the next older one.

    Returns:
        The manifest in force and the paths that it names anew.

    Raises:
        OSError: the files or the manifest could not be written.
    """
    named = {entry.path for entry in manifest.files}
    added: list[FileEntry] = []
    for path, status in files.regular_files(folder):
        if path != MANIFEST_NAME and path not in named and stat.S_ISREG(status.st_mode):
            files.fsync_file(folder / path)
            added.append(entry_of(path, digest_file(folder / path)))
    if not added:
        return manifest, []
    _fsync_folders(folder, [entry.path for entry in added])
    entries = sorted([*manifest.files, *added], key=lambda entry: entry.path)
    resealed = dataclasses.replace(manifest, files=tuple(entries))
    files.write_atomic(folder / MANIFEST_NAME, resealed.to_bytes(), durable=True)
    return resealed, [entry.path for entry in added]


__all__ = ["OutputFolder", "Part", "WorkingCheckpoint", "entry_of", "reseal"]
