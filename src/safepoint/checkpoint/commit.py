"""The commit: the action after which files count as a checkpoint (docs/adr/0016).

Every save, copy, fetch, export and final model ends in `commit`. Before the commit, the files are in a working
folder, or in a store under a name without a manifest. So no reader uses them as a checkpoint. The commit is:

- in a folder: one rename (`FolderDestination`);
- in a folder on each of several nodes: one rename on each node, after all nodes have prepared their parts. (The part
  of a node is the files of the checkpoint that the node's own folder holds.)
- in an object store: one conditional write of the manifest (`checkpoint.remote.store_destination`).

A model that is exported outside of a run's location has no manifest. In a store, it counts as complete when its last
file is written (`checkpoint.tools.atomic_export`).
"""

import contextlib
import errno
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol, TypeVar

from safepoint.checkpoint.format.catalog import lacks_record, set_aside
from safepoint.checkpoint.format.manifest import FileEntry, Manifest, NodePart
from safepoint.checkpoint.format.verify import compare_listing, is_newer_format, list_files
from safepoint.errors import ConflictError, SaveError
from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import copy_at_most, open_regular
from safepoint.foundation.volumes.needed import shortage

Record = Manifest | NodePart
"""The record of what a folder holds: a `Manifest` for a whole checkpoint, a `NodePart` for one node's part."""


def manifest_of(record: Record) -> Manifest:
    """The manifest of the whole checkpoint."""
    return record if isinstance(record, Manifest) else record.manifest


class FileRecord(Protocol):
    """The attributes of a record that a commit uses. A record is a `Manifest`, a `NodePart`, or the manifest of a
    process image."""

    file_name: ClassVar[str]
    """The name of the record's own file."""

    @property
    def files(self) -> Sequence[FileEntry]:
        """The files that the record describes."""
        ...

    def to_bytes(self) -> bytes:
        """The content of the record's own file."""
        ...


_RecordT_contra = TypeVar("_RecordT_contra", contravariant=True)


class Destination(Protocol[_RecordT_contra]):
    """A folder or a prefix of a store, in which a checkpoint, a model or an image appears whole or not at all."""

    def prepare(self, record: _RecordT_contra | None) -> None:
        """Compare the files with the record and make them durable.

        The errors that are most likely, such as a full disk, occur here, and not in `publish`.

        Args:
            record: names the files of the checkpoint; None for a model without a manifest.

        Raises:
            SafepointError: the files differ from the record, or another writer has claimed the destination.
            OSError: the disk is full, gone, or read-only.
        """
        ...

    def publish(self) -> None:
        """Make the prepared files count, in one atomic step.

        Raises:
            SafepointError: another writer has claimed the destination.
            OSError: the disk is gone, or read-only.
        """
        ...

    def discard(self) -> None:
        """Delete the files that were written and not committed."""
        ...


def _alone(work: Callable[[], None]) -> None:
    work()


def commit(
    destination: Destination[_RecordT_contra],
    record: _RecordT_contra | None,
    *,
    together: Callable[[Callable[[], None]], object] = _alone,
) -> None:
    """Make the files at `destination` count as a checkpoint or as a model.

    Args:
        destination: where the files are.
        record: see `Destination.prepare`.
        together: calls its argument. For a checkpoint in parts, it calls the argument on every node, and raises the
            error of one node on all nodes, so that no node publishes its part before all nodes have prepared theirs.

    Raises:
        SafepointError, OSError: nothing was committed, with one exception: if an fsync failed after the rename in
            `publish`, the files are committed, but may not survive a power loss.
    """
    together(lambda: destination.prepare(record))
    together(destination.publish)


@contextlib.contextmanager
def discarding(destination: Destination[Any]) -> Generator[None]:
    """If the `with` block fails, discard the files at `destination`, unless another writer has claimed it."""
    try:
        yield
    except ConflictError:
        raise
    except BaseException:
        destination.discard()
        raise


class FolderDestination:
    """A folder that gets its name when everything in it is durable.

    Args:
        source: where the files are written; on the same file system as `target`.
        target: the path at which readers look for the folder. An existing folder at this path is replaced. If the
            file system can exchange two names, there is a complete folder at `target` at any time.
        trash: a folder on the same file system for the replaced folder; None if `target` is absent or empty.
        is_durable: whether the files in `source` are fsynced already.
    """

    def __init__(self, source: Path, target: Path, *, trash: Path | None, is_durable: bool = True) -> None:
        self.source = source
        self.target = target
        self._trash = trash
        self._is_durable = is_durable

    def prepare(self, record: FileRecord | None) -> None:
        """See `Destination`."""
        if is_newer_format(self.target):
            raise SaveError(
                f"a later release of Safepoint wrote {self.target}; this release does not replace it",
                hint="move it away, or use that release",
            )
        no_links.make_folders(self.source)  # create the folder, because one node's part may have no files
        present = list_files(self.source)
        if record is not None:
            faults = compare_listing(record.files, present, extra=True)
            if faults:
                raise SaveError(f"the files in {self.source} differ from the manifest: {faults[0]}")
        if not self._is_durable:
            for path in present:
                files.fsync_file(self.source / path)
        fsync_parents(self.source, present)
        if record is None:
            files.fsync_folder(self.source)
        else:
            files.write_atomic(self.source / record.file_name, record.to_bytes(), durable=True)

    def publish(self) -> None:
        """See `Destination`. A checkpoint that another program has put at `target` is moved aside, not deleted."""
        if lacks_record(self.target) and os.listdir(self.target):
            # Raise an error if the checkpoint cannot be moved, because the code below would delete it.
            for reason in set_aside(self.target.parent, [self.target]).left.values():
                raise SaveError(
                    f"{self.target} exists, Safepoint did not write it, and it cannot be moved aside: {reason}",
                    hint="move it away",
                )
        if self._trash is not None:
            files.replace_folder(self.source, self.target, trash=self._trash)
            return
        with contextlib.suppress(FileNotFoundError):
            self.target.rmdir()
        no_links.rename(self.source, self.target)
        files.fsync_folder(self.target.parent)

    def discard(self) -> None:
        """See `Destination`."""
        files.delete_tree(self.source)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a second name of the file `source`. If that is not possible, copy the file.

    A second name is not possible on a file system without hard links. The kernel may also refuse a link to another
    user's file.

    Raises:
        OSError: the file cannot be copied, it has grown while it was copied, or the copy would fill the disk. (A
            sparse `source` may state any size, so its size is compared with the free space before the copy.)
    """
    try:
        no_links.link(source, target)
    except OSError:
        with open_regular(source) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            why = shortage(target.parent, [(target.name, size_bytes)])
            if why:
                raise OSError(errno.ENOSPC, f"it cannot be copied: {why}", str(source)) from None
            descriptor = no_links.create_file(target)
            with os.fdopen(descriptor, "wb") as copy:
                num_copied = copy_at_most(file, copy.write, size_bytes)
            if num_copied > size_bytes:
                no_links.unlink(target)
                raise OSError(errno.EAGAIN, "it has grown while it was copied", str(source)) from None


def fsync_parents(root: Path, paths: Iterable[str]) -> None:
    """Fsync the folders of `paths` below `root`, but not `root` itself."""
    parents = {parent for path in paths for parent in PurePosixPath(path).parents} - {PurePosixPath()}
    for parent in sorted(parents, reverse=True):
        files.fsync_folder(root / parent)
