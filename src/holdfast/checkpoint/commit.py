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
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast.checkpoint.catalog import checkpoint_name, list_checkpoints, step_of
from holdfast.checkpoint.digest import FileDigest, digest_file
from holdfast.checkpoint.manifest import MANIFEST_NAME, PART_NAME, FileEntry, Manifest
from holdfast.checkpoint.part import NodePart, read_manifest_of_any, read_part
from holdfast.checkpoint.retention import Candidate, Policy, select_superseded
from holdfast.errors import ConflictError, ManifestError, SaveError, StorageError
from holdfast.foundation import clock, files
from holdfast.foundation.environment import host_name
from holdfast.foundation.files import FolderLock

_CONTROL = ".holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank contributes to a checkpoint, or why it cannot.

    Args:
        rank: who.
        node: whose merged folder has it; 0 where all ranks see one folder.
        files: what it wrote, already in the merged folder.
        error: why its part is missing; None when it is there.
    """

    rank: int
    node: int = 0
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

    def claim(self, *, wait_s: float, waiting: Callable[[str], None]) -> bool:
        """Become the one writer, waiting for one that is just leaving.

        Args:
            wait_s: how long a leaving writer may take.
            waiting: told once who is being waited for.

        Returns:
            Whether the file system has locks; without them nothing is cleaned up.

        Raises:
            ConflictError: another run still holds the folder.
        """
        path = self.control / "lock"
        owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}  # for whoever is refused
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
        """Every checkpoint, or node's part of one, whose record can be read, newest first; not verified."""
        return [path for path, _ in self.manifests()]

    def manifests(self) -> list[tuple[Path, Manifest]]:
        """What `committed` says, each with its manifest."""
        found: list[tuple[Path, Manifest]] = []
        for path in list_checkpoints(self.root):
            with contextlib.suppress(ManifestError):
                if not path.is_symlink():
                    found.append((path, read_manifest_of_any(path)))
        return found

    def parts(self) -> list[tuple[Path, NodePart]]:
        """Every folder that holds this node's part of a checkpoint, newest first; contents are not verified."""
        found: list[tuple[Path, NodePart]] = []
        for path in list_checkpoints(self.root):
            with contextlib.suppress(ManifestError):
                if not path.is_symlink():
                    found.append((path, read_part(path)))
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
            if not is_in_use(path):
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
        manifest = describe_all(parts, describe)
        self._publish(manifest.files, MANIFEST_NAME, manifest.to_bytes())
        return manifest

    def commit_part(self, part: NodePart) -> None:
        """Make the sealed files of this node its part of a checkpoint; one rank of the node does it, once.

        It counts when all nodes have done so; `withdraw` takes it back when one could not.

        Raises:
            SaveError: the files are not those that the ranks reported.
            OSError: the disk is full, gone, or read-only.
        """
        self._merged.mkdir(parents=True, exist_ok=True)  # a node may have nothing to hold
        self._publish(part.files, PART_NAME, part.to_bytes())

    def withdraw(self) -> None:
        """Delete what `commit_part` has published."""
        files.discard(self.target, trash=self._output.trash)

    def _publish(self, entries: Sequence[FileEntry], name: str, record: bytes) -> None:
        present = {path: status.st_size for path, status in files.regular_files(self._merged)}
        if present != {entry.path: entry.size_bytes for entry in entries}:
            raise SaveError(f"the files in {self._merged} are not those that the ranks reported")
        _fsync_folders(self._merged, present)
        files.write_atomic(self._merged / name, record, durable=True)
        files.publish_folder(self._merged, self.target, trash=self._output.trash)

    def discard(self) -> None:
        """Delete what is left of the working folder, after the commit or instead of it."""
        files.delete_tree(self._root)


def describe_all(parts: Sequence[Part], describe: Callable[[tuple[FileEntry, ...]], Manifest]) -> Manifest:
    """The manifest of what all ranks wrote; see `WorkingCheckpoint.commit`.

    Raises:
        SaveError: a part is missing, two ranks wrote different content under one name, or the whole is not a
            checkpoint.
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
        return describe(tuple(entries[path] for path in sorted(entries)))
    except ValueError as error:
        raise SaveError(f"no manifest can say what the ranks wrote: {error}") from error


def is_in_use(folder: Path) -> bool:
    """Whether somebody reads or uploads the checkpoint in `folder`, or the part."""
    return any(files.is_being_read(folder / name) for name in (MANIFEST_NAME, PART_NAME))


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
    added = added_files(folder, manifest)
    if not added:
        return manifest, []
    resealed = extended(manifest, added)
    files.write_atomic(folder / MANIFEST_NAME, resealed.to_bytes(), durable=True)
    return resealed, [entry.path for entry in added]


def reseal_part(folder: Path, part: NodePart, manifest: Manifest, added: Sequence[FileEntry]) -> None:
    """The same for one node's part: `manifest` names what all nodes have added, `added` what this one has.

    Raises:
        OSError: the record could not be written.
    """
    paths = sorted({*part.paths, *(entry.path for entry in added)})
    resealed = dataclasses.replace(part, paths=tuple(paths), manifest=manifest)
    files.write_atomic(folder / PART_NAME, resealed.to_bytes(), durable=True)


def added_files(folder: Path, manifest: Manifest) -> list[FileEntry]:
    """What lies in the folder and is not in the manifest, made durable.

    Raises:
        OSError: it could not be read.
    """
    named = {MANIFEST_NAME, PART_NAME, *(entry.path for entry in manifest.files)}
    added: list[FileEntry] = []
    for path, status in files.regular_files(folder):
        if path not in named and stat.S_ISREG(status.st_mode):
            files.fsync_file(folder / path)
            added.append(entry_of(path, digest_file(folder / path)))
    _fsync_folders(folder, [entry.path for entry in added])
    return added


def extended(manifest: Manifest, added: Iterable[FileEntry]) -> Manifest:
    """`manifest` with further files; of two under one name the first counts.

    Raises:
        ValueError: no manifest can name them.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for entry in added:
        entries.setdefault(entry.path, entry)
    return dataclasses.replace(manifest, files=tuple(entries[path] for path in sorted(entries)))


__all__ = [
    "OutputFolder",
    "Part",
    "WorkingCheckpoint",
    "added_files",
    "describe_all",
    "entry_of",
    "extended",
    "is_in_use",
    "reseal",
    "reseal_part",
]
