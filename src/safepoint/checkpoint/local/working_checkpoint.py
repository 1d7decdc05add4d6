"""Assembles the files of all ranks into one checkpoint in a folder.

1. Every rank writes into a folder of its own below `.safepoint/work/<attempt>/checkpoint-<step>/`.
2. Every rank seals its part (the files that it has written): it fsyncs and digests each file, and moves the file into
   the merged folder.
3. The first rank collects the lists of these files, makes the manifest and commits (`safepoint.checkpoint.commit`).
   If each node has a folder of its own, one rank of every node commits the files of its node.

A crash before the commit leaves a working folder, which the next run in the output folder deletes. A crash after the
commit leaves a complete checkpoint.

A user's callback, for example, may add files after the commit. They are not part of the checkpoint until
`replace_record` has written a record (a manifest or the record of a part) that names them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, Record, commit, fsync_parents
from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Describe, FileEntry, Manifest
from safepoint.checkpoint.format.verify import list_files, read_part
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SaveError
from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The files that one rank, or the keeper of one node, adds to a checkpoint; or the error that prevented that.

    The keeper is the process of each node that writes snapshots to disk.

    Args:
        rank: the rank that wrote the files; for a keeper, the number of its node.
        node: the node whose folder has the files; 0 if all ranks share one folder.
        files: the written files, already in the merged folder.
        error: why there are no files, with the number of the rank or node; None if there are files.
        is_full: whether the cause of the error is a full disk or quota.
    """

    rank: int
    node: int = 0
    files: tuple[FileEntry, ...] = ()
    error: str | None = None
    is_full: bool = False


class WorkingCheckpoint(FolderDestination):
    """A checkpoint that ranks write, before its commit.

    Args:
        output: the output folder.
        attempt_id: the name of this start of the run. A process of an earlier start has another name, so it writes to
            another folder.
        step: how many optimizer steps are done.
        target: the folder to commit to; `checkpoint-<step>` in the output folder when None.
    """

    def __init__(self, output: OutputFolder, *, attempt_id: str, step: int, target: Path | None = None) -> None:
        target = target or output.root / checkpoint_name(step)
        self.name = target.name
        self._root = output.work / attempt_id / self.name
        super().__init__(self._root / "merged", target, trash=output.trash)

    def rank_root(self, rank: int) -> Path:
        """Create and return the folder that the framework of `rank` uses as its output folder.

        The framework saves to `checkpoint-<step>/` in this folder.
        """
        root = self._root / f"rank-{rank}"
        no_links.make_folders(root / self.name)
        return root

    def seal(self, rank: int, *, node: int = 0) -> RankPart:
        """Make the files that `rank` wrote durable, and move them into the merged folder.

        Raises:
            SaveError: the rank wrote a link or a special file.
            OSError: the disk is full, gone, or read-only.
        """
        written = self._root / f"rank-{rank}" / self.name
        entries: list[FileEntry] = []
        for path, size_bytes in list_files(written).items():
            if size_bytes is None:
                raise SaveError(f"{path} is a link or a special file, which a checkpoint cannot hold")
            entries.append(_seal_file(written, path))
        for entry in entries:
            destination = self.source / entry.path
            no_links.make_folders(destination.parent)
            no_links.rename(written / entry.path, destination)
        return RankPart(rank=rank, node=node, files=tuple(entries))

    def commit(self, parts: Sequence[RankPart], describe: Describe) -> Manifest:
        """Commit the sealed parts of all ranks. Only the first rank calls this method, and only once.

        Raises:
            SaveError: see `merge_parts`; or the files differ from the files that the ranks reported.
            OSError: the disk is full, gone, or read-only.
        """
        manifest = merge_parts(parts, describe)
        commit(self, manifest)
        return manifest

    def discard(self) -> None:
        """Delete the working folder, after the commit or instead of a commit."""
        files.delete_tree(self._root)


def merge_parts(parts: Sequence[RankPart], describe: Describe) -> Manifest:
    """The manifest of the files of all ranks.

    Args:
        parts: one for each rank.
        describe: makes the manifest.

    Raises:
        SaveError: a part is missing, two ranks wrote different content under one name, or the values are not valid
            in a manifest.
    """
    broken = [part.error for part in parts if part.error is not None]
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
        raise SaveError(f"the manifest is invalid: {error}") from error


def find_added_files(folder: Path, manifest: Manifest) -> list[FileEntry]:
    """Find the files in `folder` that the manifest does not name, and make them durable.

    Raises:
        OSError: a file cannot be read.
    """
    named = {MANIFEST_NAME, PART_NAME, *(entry.path for entry in manifest.files)}
    found = list_files(folder).items()
    added = [_seal_file(folder, path) for path, size_bytes in found if path not in named and size_bytes is not None]
    fsync_parents(folder, [entry.path for entry in added])
    return added


def _seal_file(folder: Path, path: str) -> FileEntry:
    files.fsync_file(folder / path)
    return FileEntry.of(path, digest_file(folder / path))


def extend_manifest(manifest: Manifest, added: Iterable[FileEntry]) -> Manifest:
    """`manifest` with the entries `added`. If several entries have the same path, the first one is used.

    Raises:
        ValueError: the manifest would be invalid.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for entry in added:
        entries.setdefault(entry.path, entry)
    return dataclasses.replace(manifest, files=tuple(entries[path] for path in sorted(entries)))


def replace_record(folder: Path, manifest: Manifest, added: Sequence[FileEntry]) -> None:
    """Replace the record in `folder` with a record that also names the added files.

    If it is the record of a part, the new record also says that the part is closed (`NodePart.is_open` is False).

    Args:
        folder: a committed checkpoint, or one node's part of it.
        manifest: the new manifest, with the files that all nodes have added.
        added: the files that were added to this folder.

    Raises:
        ManifestError: the part in `folder` cannot be read.
        OSError: the record could not be written.
    """
    record: Record = manifest
    if not (folder / MANIFEST_NAME).exists():
        part = read_part(folder)
        paths = sorted({*part.paths, *(entry.path for entry in added)})
        record = dataclasses.replace(part, paths=tuple(paths), manifest=manifest, is_open=False)
    files.write_atomic(folder / record.file_name, record.to_bytes(), durable=True, below=folder.parent)
