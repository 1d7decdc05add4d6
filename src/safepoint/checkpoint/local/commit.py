"""From the files of all ranks to one checkpoint: absent or complete, never in between.

The protocol (docs/commit.md):

1. every rank writes into a folder of its own below `.safepoint/work/<attempt>/checkpoint-<step>/`;
2. every rank seals its part: each file fsynced, digested and moved into the merged folder;
3. the first rank collects the parts, fsyncs the folders, writes the manifest, fsyncs it, and gives the merged
   folder its final name with one rename, which is the commit;
4. everybody hears the verdict.

A crash before the rename leaves nothing but a working folder, and the next owner of the output folder
deletes it; a crash after it leaves a complete checkpoint.
"""

import dataclasses
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.digest import FileDigest, digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.node_part import NodePart
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SaveError
from safepoint.foundation import files


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
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
        self.merged = self._root / "merged"
        """Where the sealed files of all ranks lie until the commit."""

    def rank_root(self, rank: int) -> Path:
        """Where rank `rank` lets its framework write: it creates `<rank_root>/checkpoint-<step>/`."""
        root = self._root / f"rank-{rank}"
        (root / self.name).mkdir(parents=True, exist_ok=True)
        return root

    def seal(self, rank: int) -> RankPart:
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
            destination = self.merged / entry.path
            destination.parent.mkdir(parents=True, exist_ok=True)
            (source / entry.path).rename(destination)
        return RankPart(rank=rank, files=tuple(entries))

    def commit(self, parts: Sequence[RankPart], describe: Callable[[tuple[FileEntry, ...]], Manifest]) -> Manifest:
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
        self._finish(manifest.files, MANIFEST_NAME, manifest.to_bytes())
        files.publish_folder(self.merged, self.target, trash=self._output.trash)
        return manifest

    def prepare_part(self, part: NodePart) -> None:
        """Make all but the last step towards this node's part of a checkpoint; one rank of the node does it, once.

        Whatever can fail fails here, before any node has replaced anything; `publish_part` follows on all of them.

        Raises:
            SaveError: the files are not those that the ranks reported.
            OSError: the disk is full, gone, or read-only.
        """
        self.merged.mkdir(parents=True, exist_ok=True)  # a node may have nothing to hold
        self._finish(part.files, PART_NAME, part.to_bytes())

    def publish_part(self) -> None:
        """Give the prepared part its name.

        Raises:
            OSError: the disk is gone, or read-only.
        """
        files.publish_folder(self.merged, self.target, trash=self._output.trash)

    def _finish(self, entries: Sequence[FileEntry], name: str, record: bytes) -> None:
        present = {path: status.st_size for path, status in files.regular_files(self.merged)}
        if present != {entry.path: entry.size_bytes for entry in entries}:
            raise SaveError(f"the files in {self.merged} are not those that the ranks reported")
        _fsync_folders(self.merged, present)
        files.write_atomic(self.merged / name, record, durable=True)

    def discard(self) -> None:
        """Delete what is left of the working folder, after the commit or instead of it."""
        files.delete_tree(self._root)


def describe_all(parts: Sequence[RankPart], describe: Callable[[tuple[FileEntry, ...]], Manifest]) -> Manifest:
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
    """Close one node's part: `manifest` names what all nodes have added to the checkpoint, `added` what this one has.

    Raises:
        OSError: the record could not be written.
    """
    paths = sorted({*part.paths, *(entry.path for entry in added)})
    resealed = dataclasses.replace(part, paths=tuple(paths), manifest=manifest, is_open=False)
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
