"""Exports a model to an empty place, in which it appears completely or not at all.

- A folder gets its name when everything in it is durable.
- The prefix `final` below a run's location in a store, the place of its final model, gets its manifest last, as at
  the end of a training.
- Any other prefix of a store is marked by `.safepoint/export.json`, which names the files, before the first byte is
  written. The file that loaders read first is written last, and then the mark is deleted. The next export to the same
  place deletes the files of an interrupted export, and no others.
"""

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.commit import FolderDestination, Record, commit, discarding
from safepoint.checkpoint.format.catalog import refuse_inside_checkpoint
from safepoint.checkpoint.format.manifest import Describe, FileEntry
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.final_model import FINAL
from safepoint.checkpoint.remote.remote_folder import RemoteFolder, is_name
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
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.environment import host_name
from safepoint.foundation.files import make_folder
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import ABSENT, Condition, Progress, Store, is_key

MARK = ".safepoint/export.json"
_MAX_MARK_BYTES = 64 << 20
_LAST = ("model.safetensors.index.json", "adapter_config.json", "config.json")
"""The files that loaders read first, in the order in which they are written."""


def check_empty(target: Location, *, has_manifest: bool = False) -> None:
    """Refuse a place that holds files, except those that an interrupted export has left there.

    Args:
        target: the place.
        has_manifest: whether what is exported has a manifest, see `export_to_store`.

    Raises:
        ConflictError: there are files.
        UsageError: the place is inside a checkpoint, a model that a run writes, or `.safepoint`.
        StorageError: the place cannot be read.
    """
    if target.is_remote:
        _refuse_inside(target)
    store = open_store(target)
    keys = {item.key for item in store.list()}
    if target.is_remote and MARK in keys:  # an export to a folder writes no mark
        keys -= {MARK, *_marked_files(store)}
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
    """Whether `name` is a checkpoint or a model of Safepoint. An object that only has the name of a manifest is none,
    but a name that Safepoint gives counts even if its manifest is damaged."""
    try:
        remote.manifest_of(name)
    except UnreadableError:
        return True  # it may be one
    except ManifestError:
        return remote.is_newer_format(name) or (is_name(name) and _has_manifest(remote, name))
    return True


def _has_manifest(remote: RemoteFolder, name: str) -> bool:
    with contextlib.suppress(ManifestError):
        return remote.bytes_of_manifest(name) is not None
    return True  # it is too large to be read


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
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        make_folder(folder.parent)
        working.mkdir()  # fails in some places that look like folders, such as /proc
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be created: {error.strerror}; nothing was written", hint="name another folder"
        ) from error
    destination = FolderDestination(working, folder, trash=None)
    with discarding(destination):
        write(working)
        commit(destination, None)


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
            run has a manifest, other exports have none. None if the source has no manifest.
        progress: receives the number of bytes that have reached the store.
        check: called immediately before the commit; its exceptions end the export.

    Raises:
        CheckpointError: a file differs from its manifest entry. Nothing is left at the target.
        ConflictError: another writer uses the place.
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
        self._paths = sorted(file.path for file in model)
        self._id = uuid.uuid4().hex
        self._last: tuple[SourceFile, Progress | None] | None = None
        self.entries: tuple[FileEntry, ...] = ()

    def begin(self, files: Mapping[str, int]) -> None:
        store = self._store
        keys = {item.key for item in store.list()}
        condition, leftovers = ABSENT, set[str]()
        if MARK in keys:
            condition = Condition(version=store.stat(MARK).version)
            leftovers = keys & _marked_files(store)
        mark = {"id": self._id, "host": host_name(), "since": clock.utc_now(), "files": self._paths}
        try:
            store.write(MARK, json.dumps(mark).encode(), condition=condition)
        except ConditionError as error:
            raise ConflictError(f"another export to {store.location} has just begun; nothing was exported") from error
        self._delete(leftovers)

    def put(self, file: SourceFile, progress: Progress | None) -> None:
        """Upload the file of the previous call, and keep this one: the commit uploads the last file."""
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
        if _read_mark(self._store, deadline_s).get("id") != self._id:
            raise ConflictError(f"another export to {self._store.location} has begun; this one has ended")

    def discard(self) -> None:
        deadline_s = clock.monotonic_s() + DISCARD_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._fence(deadline_s)
            self._delete(self._paths, deadline_s)
            self._store.delete(MARK, deadline_s=deadline_s)

    def _delete(self, paths: Collection[str], deadline_s: float | None = None) -> None:
        """Delete `paths`, and abort unfinished uploads of these files and of the files of this export."""
        keys = {*paths, *self._paths}
        self._store.sweep(only=keys.__contains__, keys=keys, deadline_s=deadline_s)
        for path in sorted(paths):
            self._store.delete(path, deadline_s=deadline_s)


def clean_export(store: Store, *, before_s: float) -> int:
    """Delete the files of an interrupted export.

    Args:
        store: the place of the export.
        before_s: a time, seconds since 1970. An export that has written a file after this time may still run; its
            files are not deleted.

    Returns:
        The number of deleted objects.

    Raises:
        ConditionError: another export to the place has just begun.
        StorageError: the store cannot be used.
    """
    found = {item.key: item for item in store.list()}
    if MARK not in found:
        return 0
    named = _marked_files(store)
    doomed = [item for key, item in found.items() if key in named]
    if max(item.modified_s for item in [found[MARK], *doomed]) >= before_s:
        return 0
    # The mark is replaced first, so that an export that still runs finds that it has lost the place.
    taken = json.dumps({"files": sorted(named)}).encode()
    store.write(MARK, taken, condition=Condition(version=found[MARK].version))
    store.sweep(only=named.__contains__, keys=named)
    for item in [*doomed, found[MARK]]:
        store.delete(item.key)
    return len(doomed) + 1


def _marked_files(store: Store) -> set[str]:
    """The files that the mark of an export names."""
    paths: Any = _read_mark(store).get("files")
    named = cast("list[Any]", paths) if isinstance(paths, list) else []
    # An export writes nothing below the name of a checkpoint.
    paths = {path for path in named if isinstance(path, str) and is_key(path) and path != MARK}
    return {path for path in paths if not ("/" in path and is_name(path.partition("/")[0]))}


def _read_mark(store: Store, deadline_s: float | None = None) -> dict[str, Any]:
    with contextlib.suppress(ObjectNotFoundError, ValueError):
        length = min(store.stat(MARK, deadline_s=deadline_s).size_bytes, _MAX_MARK_BYTES)
        data = store.read(MARK, length=length, deadline_s=deadline_s).tobytes()
        return parse_object(data, max_bytes=_MAX_MARK_BYTES)
    return {}
