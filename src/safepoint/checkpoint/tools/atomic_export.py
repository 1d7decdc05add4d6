"""Exports a model to an empty folder or prefix, in which the model appears completely or not at all.

- An export to a folder writes under a temporary name. It renames the folder when everything in it is durable.
- An export to the prefix `final` of a run's location in a store (the place of the run's final model) writes the
  manifest last, as a training does at its end. Only a source with a manifest is exported in this way.
- Any other export to a store first writes a mark, the object `.safepoint/export.json`, which names the files. Then it
  writes the files. The file that loaders read first is written last. Then the export deletes the mark. If an export
  was interrupted, the next export to the same prefix deletes the files that the mark of the interrupted export names,
  and no others. Another person may have written the mark, so the next export deletes only objects that the rules in
  `safepoint.checkpoint.remote.marks` allow.
"""

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, Record, commit, discarding
from safepoint.checkpoint.format.catalog import refuse_inside_checkpoint
from safepoint.checkpoint.format.manifest import Describe, FileEntry
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.remote.marks import MAX_MARK_BYTES, Mark, is_name
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import DISCARD_WITHIN_S, StoreDestination
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.errors import (
    ConditionError,
    ConflictError,
    ManifestError,
    ObjectNotFoundError,
    SafepointError,
    StorageError,
    UnreadableError,
    UsageError,
    printable,
)
from safepoint.foundation import clock
from safepoint.foundation.environment import host_name
from safepoint.foundation.files import delete_entries, make_folder
from safepoint.foundation.shared_folders.held_folder import HeldFolder, held
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import ABSENT, Condition, Progress, Store, StoredObject

MARK = ".safepoint/export.json"
_LAST = ("model.safetensors.index.json", "adapter_config.json", "config.json")
"""The files that loaders read first, in the order in which they are written."""


def check_empty(target: Location, *, has_manifest: bool = False) -> None:
    """Refuse a target that holds files. Files that an interrupted export has left there do not count.

    Args:
        target: the folder or prefix.
        has_manifest: whether the source of the export has a manifest, see `export_to_store`.

    Raises:
        ConflictError: there are files.
        UsageError: the target is inside a checkpoint, a model that a run writes, or `.safepoint`.
        StorageError: the target cannot be read.
    """
    if target.is_remote:
        _refuse_inside(target)
    store = open_store(target)
    found = {item.key: item for item in store.list()}
    keys = set(found)
    if target.is_remote and MARK in keys:  # an export to a folder writes no mark
        keys -= {MARK, *_leftovers(_read_mark(store), found)}
    is_final = has_manifest and target.is_remote and target.name == FINAL
    if keys and not (is_final and _is_unfinished_final(RemoteFolder(open_store(target.parent)))):
        raise ConflictError(
            f"{target} is not empty: it contains {printable(min(keys))}; nothing was exported",
            hint="name an empty location",
        )


def _refuse_inside(target: Location) -> None:
    """Refuse a prefix inside `.safepoint`, or inside a checkpoint or model that is committed or still being written.

    These prefixes themselves are refused too, except `final`.

    Raises:
        UsageError: the prefix is refused.
    """
    place = target
    while place.path:
        parent = place.parent
        is_own = place.name == ".safepoint"
        if place != target or place.name != FINAL:
            remote = RemoteFolder(open_store(parent))
            is_own = is_own or (is_name(place.name) and place.name in remote.unfinished())
            is_own = is_own or _holds_checkpoint(remote, place.name)
        if is_own:
            raise UsageError(
                f"{target} is inside {place}, which Safepoint writes; nothing was exported",
                hint=f"name another location, such as {parent.child('model')}",
            )
        place = parent


def _holds_checkpoint(remote: RemoteFolder, name: str) -> bool:
    """Whether the prefix `name` holds a checkpoint or a model of Safepoint.

    If the object with the name of the manifest is not a manifest, the prefix does not count as a checkpoint. There is
    an exception: a prefix that is called `final`, or has the name of a checkpoint (`checkpoint-500`), counts in this
    case too, because the object may be a damaged manifest.
    """
    try:
        remote.manifest_of(name)
    except UnreadableError:
        return True  # refuse the prefix, because it may hold a checkpoint
    except ManifestError:
        return remote.is_newer_format(name) or (is_name(name) and remote.bytes_of_manifest(name) is not None)
    return True


def export_to_folder(target: Location, write: Callable[[Path], None]) -> None:
    """Write a model to a folder.

    Args:
        target: a folder of this machine, empty or absent.
        write: writes the files into the empty folder that it receives, durably.

    Raises:
        StorageError: the folder cannot be created.
        UsageError: the folder is inside a checkpoint or `.safepoint`.
        OSError: the disk is full or gone.
    """
    folder = target.folder.absolute()
    refuse_inside_checkpoint(folder)
    working = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    with contextlib.ExitStack() as holding:
        try:
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            make_folder(folder.parent)
            working.mkdir()  # this fails in some places that look like folders, such as /proc
            place = holding.enter_context(held(working, shown=folder))
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be created: {error.strerror}; nothing was written", hint="name another folder"
            ) from error
        destination = _NewFolder(place, folder)
        with discarding(destination):
            write(place.inside)
            commit(destination, None)


class _NewFolder(FolderDestination):
    """The working folder of an export.

    Safepoint fills and, after an error, empties the folder through an open descriptor, not through its path. So a
    user who may write to the folder above cannot lead the export into another folder, even if this user replaces the
    working folder by a link or by another folder. Until the commit, only the user who runs the export may enter the
    working folder.

    Args:
        place: the working folder.
        target: see `FolderDestination`.
    """

    def __init__(self, place: HeldFolder, target: Path) -> None:
        super().__init__(place.inside, target, trash=None)
        self._place = place
        self._mode = stat.S_IMODE(os.fstat(place.descriptor).st_mode)
        self._set_mode(self._mode & 0o700)

    def _set_mode(self, mode: int) -> None:
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(self._place.descriptor, mode)

    def publish(self) -> None:
        self.source = self._place.path
        self._place.check_name(self.source)
        self._set_mode(self._mode)
        super().publish()
        # Check again after the rename, because another folder may have taken the name just before.
        self._place.check_name(self.target)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            delete_entries(self._place.inside, pattern="*")
            if self._place.has_name(self._place.path):
                self._place.path.rmdir()


def export_to_store(
    target: Location,
    model: Sequence[SourceFile],
    *,
    describe: Describe | None,
    progress: Progress | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a model to an object store, without writing to a disk of this machine.

    Args:
        target: a prefix with nothing below it.
        model: the files.
        describe: makes the manifest of the model. It is used only for a target called `final`: the final model of a
            run has a manifest, other exports have none. `describe` is None if the source has no manifest.
        progress: receives the number of bytes that have reached the store.
        check: called immediately before the commit; its exceptions end the export.

    Raises:
        CheckpointError: a file differs from its manifest entry. Nothing is left at the target.
        ConflictError: another writer uses the target.
        StorageError: the store cannot be used, or a source cannot be read.
    """
    if describe is not None and target.name == FINAL:
        destination = StoreDestination(RemoteFolder.as_guest(open_store(target.parent)), FINAL)
    else:
        destination, describe = _PrefixDestination(target, model), None
    destination.begin(files={file.path: file.size_bytes for file in model})
    with discarding(destination):
        for file in sorted(model, key=_order):
            destination.put(file, progress)
        check()
        commit(destination, describe(destination.entries) if describe is not None else None)


def _order(file: SourceFile) -> tuple[int, str]:
    return (_LAST.index(file.path) + 1 if file.path in _LAST else 0), file.path


def _is_unfinished_final(remote: RemoteFolder) -> bool:
    """Whether a run or an export has begun to write `final` and not finished."""
    return FINAL in remote.unfinished() and remote.bytes_of_manifest(FINAL) is None


class _PrefixDestination:
    """A prefix of a store for a model without a manifest. The commit writes the file that loaders read first."""

    def __init__(self, target: Location, model: Sequence[SourceFile]) -> None:
        self._store = open_store(target)
        self._files = {file.path: file.size_bytes for file in model}
        self._id = uuid.uuid4().hex
        self._last: tuple[SourceFile, Progress | None] | None = None
        self.entries: tuple[FileEntry, ...] = ()

    def begin(self, files: Mapping[str, int]) -> None:
        store = self._store
        found = {item.key: item for item in store.list()}
        condition, earlier = ABSENT, Mark()
        if MARK in found:
            condition = Condition(version=store.stat(MARK).version)
            earlier = _read_mark(store)
        leftovers = _leftovers(earlier, found)
        fields = Mark().extended(files, found, leftovers).fields()
        mark = {"id": self._id, "host": host_name(), "since": clock.utc_now(), **fields}
        try:
            store.write(MARK, json.dumps(mark).encode(), condition=condition)
        except ConditionError as error:
            raise ConflictError(f"another export to {store.location} has just begun; nothing was exported") from error
        self._delete(leftovers)

    def put(self, file: SourceFile, progress: Progress | None) -> None:
        """Upload the file of the previous call, and keep `file` for later: the commit uploads the last file."""
        self._put_last()
        self._last = file, progress

    def _put_last(self) -> None:
        if self._last is not None:
            file, progress = self._last
            entry = upload_verified(self._store, file.path, file, fence=self._fence, progress=progress)
            self.entries = (*self.entries, entry)

    def prepare(self, record: Record | None) -> None:
        store = self._store
        found = {item.key: item.size_bytes for item in store.list() if item.key != MARK}
        faults = compare_listing(self.entries, found, extra=True)
        if faults:
            raise StorageError(f"another writer changed {store.location}: {faults[0]}; the export is not complete")

    def publish(self) -> None:
        self._put_last()
        self._store.delete(MARK)

    def _fence(self, deadline_s: float | None = None) -> None:
        if _read_mark(self._store, deadline_s).content.get("id") != self._id:
            raise ConflictError(f"another export to {self._store.location} has begun; this export was stopped")

    def discard(self) -> None:
        deadline_s = clock.monotonic_s() + DISCARD_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._fence(deadline_s)
            self._delete(self._files, deadline_s)
            self._store.delete(MARK, deadline_s=deadline_s)

    def _delete(self, paths: Collection[str], deadline_s: float | None = None) -> None:
        """Delete `paths`, and abort unfinished uploads of these files and of the files of this export."""
        keys = {*paths, *self._files}
        self._store.sweep(only=keys.__contains__, keys=keys, deadline_s=deadline_s)
        for path in sorted(paths):
            self._store.delete(path, deadline_s=deadline_s)


def clean_export(store: Store, *, before_s: float) -> int:
    """Delete the files of an interrupted export.

    Args:
        store: the store at the target of the export.
        before_s: a time, seconds since 1970. An export that has written a file after this time may still be active;
            its files are not deleted.

    Returns:
        The number of deleted objects.

    Raises:
        ConditionError: another export to this target has just begun.
        StorageError: the store cannot be used.
    """
    found = {item.key: item for item in store.list()}
    if MARK not in found:
        return 0
    mark = _read_mark(store)
    named = _leftovers(mark, found)
    begun = {path for path in mark.sizes if _is_exported(path)}
    doomed = [item for key, item in found.items() if key in named]
    if max(item.modified_s for item in [found[MARK], *doomed]) >= before_s:
        return 0
    # The mark is replaced first. If the export still runs, its next `_fence` raises an error.
    taken = json.dumps(mark.extended({}, found, named).fields()).encode()
    store.write(MARK, taken, condition=Condition(version=found[MARK].version))
    store.sweep(only=begun.__contains__, keys=begun)
    for item in [*doomed, found[MARK]]:
        store.delete(item.key)
    return len(doomed) + 1


def _leftovers(mark: Mark, found: Mapping[str, StoredObject]) -> set[str]:
    """The files of an interrupted export, according to its mark."""
    return {path for path, item in found.items() if _is_exported(path) and mark.names(path, item)}


def _is_exported(path: str) -> bool:
    """Whether an export may have written the file at `path`. An export writes no hidden files, and no files below a
    prefix with the name of a checkpoint or `final`."""
    parts = path.split("/")
    return not any(part.startswith(".") for part in parts) and not (len(parts) > 1 and is_name(parts[0]))


def _read_mark(store: Store, deadline_s: float | None = None) -> Mark:
    with contextlib.suppress(ObjectNotFoundError):
        found = store.stat(MARK, deadline_s=deadline_s)
        data = store.read(MARK, length=min(found.size_bytes, MAX_MARK_BYTES), deadline_s=deadline_s).tobytes()
        return Mark.parse(data, found.modified_s)
    return Mark()
