"""Where a model is put together so that it appears whole or not at all: in a folder, or in an object store.

A folder gets its name when everything is in it. A prefix of a store has no name to give: there

- `final` of a run's location gets its manifest last, as at the end of a training (`arriving`);
- any other place is marked by `.safepoint/export.json`, which names what is going to be written, before the first
  byte. The file without which no loader begins comes last, on the condition that there is none, and then the mark
  goes. Whoever exports to the same place next deletes what a dead export has left there, and nothing else.
"""

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.local.final_record import FINAL
from safepoint.checkpoint.remote.model_upload import ABANDON_WITHIN_S, Describe, ModelUpload, put_verified
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import ConditionError, ConflictError, ObjectNotFoundError, SafepointError, StorageError
from safepoint.foundation import clock, files
from safepoint.foundation.environment import host_name
from safepoint.foundation.units import printable
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.store import ABSENT, Condition, Content, Progress, Store

MARK = ".safepoint/export.json"
_MAX_MARK_BYTES = 64 << 20
_LAST = ("model.safetensors.index.json", "adapter_config.json", "config.json")
"""What loaders read first, the very first one at the end."""


class ModelFile(NamedTuple):
    """A file of a model.

    Args:
        path: within the model.
        source: its bytes.
        expected: what a manifest says of them, or None.
    """

    path: str
    source: Path | Content
    expected: FileEntry | None = None


def check_empty(target: Location, *, has_manifest: bool = False) -> None:
    """Refuse a place where there is something; what a dead export has left there is nothing.

    Args:
        target: the place.
        has_manifest: whether what comes there has one, see `fill_store`.

    Raises:
        ConflictError: there is something.
        StorageError: it cannot be read.
    """
    store = open_store(target)
    keys = {item.key for item in store.list()}
    if MARK in keys:
        keys -= {MARK, *_marked(store)}
    if keys and not (has_manifest and target.is_remote and _is_begun_final(target)):
        raise ConflictError(
            f"{target} is not empty, there is {printable(min(keys))}; nothing was exported", hint="name a new place"
        )


def fill_folder(target: Location, fill: Callable[[Path], None]) -> None:
    """Make a model in a folder.

    Args:
        target: a folder of this machine, empty or not there.
        fill: makes the files in a folder that is not there yet, durably.

    Raises:
        StorageError: there can be no such folder.
        OSError: the disk is full or gone.
    """
    folder = target.folder.absolute()
    working = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        folder.parent.mkdir(parents=True, exist_ok=True)
        working.mkdir()  # which some places refuse that look like folders
        working.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made: {error.strerror}; nothing was written", hint="name another folder"
        ) from error
    try:
        fill(working)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # it is empty
        working.rename(folder)
        files.fsync_folder(folder.parent)
    finally:
        files.delete_tree(working)


def fill_store(
    target: Location,
    model: Sequence[ModelFile],
    *,
    describe: Describe | None,
    progress: Progress | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make a model in an object store; no byte of it is written to a disk of this machine.

    Args:
        target: a prefix with nothing below it.
        model: the files.
        describe: makes the manifest that `final` of an output location has; None where nobody can.
        progress: told the bytes that are there.
        check: the last word before the model counts; what it raises ends the export.

    Raises:
        CheckpointError: a file is not what its manifest says; nothing is left.
        ConflictError: somebody else writes there.
        StorageError: the store cannot be used, or a source cannot be read.
    """
    is_final = describe is not None and _is_final(target)
    landing: _Landing = _Final(target, describe) if is_final and describe else _Plain(target, model)
    landing.begin()
    try:
        for file in sorted(model, key=_place):
            landing.put(file, progress)
        check()
        landing.commit()
    except BaseException as error:
        if not isinstance(error, ConflictError):
            landing.abandon()
        raise


def _place(file: ModelFile) -> tuple[int, str]:
    return (_LAST.index(file.path) + 1 if file.path in _LAST else 0), file.path


def _is_final(target: Location) -> bool:
    return target.name == FINAL


def _is_begun_final(target: Location) -> bool:
    """Whether it is what a run, or an export, has begun to write as `final` and not ended."""
    if not _is_final(target):
        return False
    remote = RemoteFolder(open_store(target.parent))
    return FINAL in remote.unfinished() and remote.bytes_of_manifest(FINAL) is None


class _Final:
    """`final` of an output location."""

    def __init__(self, target: Location, describe: Describe) -> None:
        self._model = ModelUpload(RemoteFolder.as_guest(open_store(target.parent)), FINAL)
        self._describe = describe

    def begin(self) -> None:
        self._model.begin()

    def put(self, file: ModelFile, progress: Progress | None) -> None:
        self._model.put(file.path, file.source, expected=file.expected, progress=progress)

    def commit(self) -> None:
        self._model.commit(self._describe)

    def abandon(self) -> None:
        self._model.abandon()


class _Plain:
    """Any other place, in which nobody looks for a manifest."""

    def __init__(self, target: Location, model: Sequence[ModelFile]) -> None:
        self._store = open_store(target)
        self._paths = sorted(file.path for file in model)
        self._id = uuid.uuid4().hex
        self._last: tuple[ModelFile, Progress | None] | None = None
        self._sizes: dict[str, int] = {}

    def begin(self) -> None:
        store = self._store
        keys = {item.key for item in store.list()}
        condition, leftovers = ABSENT, set[str]()
        if MARK in keys:
            condition = Condition(version=store.stat(MARK).version)
            leftovers = keys & _marked(store)
        mark = {"id": self._id, "host": host_name(), "since": clock.utc_now(), "files": self._paths}
        try:
            store.write(MARK, json.dumps(mark).encode(), condition=condition)
        except ConditionError as error:
            raise ConflictError(f"another export to {store.location} has just begun; nothing was exported") from error
        self._clear(leftovers)

    def put(self, file: ModelFile, progress: Progress | None) -> None:
        self._sizes[file.path] = size_of(file)
        if self._last is not None:
            self._put(*self._last)
        self._last = file, progress

    def _put(self, file: ModelFile, progress: Progress | None) -> None:
        put_verified(
            self._store, file.path, file.source, expected=file.expected, fence=self._fence, progress=progress
        )

    def commit(self) -> None:
        assert self._last is not None
        file, progress = self._last
        del self._sizes[file.path]
        store = self._store
        found = {item.key: item.size_bytes for item in store.list() if item.key != MARK}
        if found != self._sizes:
            odd = min(path for path in found.keys() | self._sizes.keys() if found.get(path) != self._sizes.get(path))
            raise StorageError(f"{store.location} was changed by somebody else: {printable(odd)}; it is not complete")
        self._put(file, progress)
        store.delete(MARK)

    def _fence(self, deadline_s: float | None = None) -> None:
        if _mark_of(self._store, deadline_s).get("id") != self._id:
            raise ConflictError(f"another export to {self._store.location} has begun; this one has ended")

    def abandon(self) -> None:
        deadline_s = clock.monotonic_s() + ABANDON_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._fence(deadline_s)
            self._clear(self._paths, deadline_s)
            self._store.delete(MARK, deadline_s=deadline_s)

    def _clear(self, paths: Collection[str], deadline_s: float | None = None) -> None:
        """Delete what is there of `paths`, and whatever is on its way there."""
        self._store.sweep(chosen=lambda key: key in paths or key in self._paths, deadline_s=deadline_s)
        for path in sorted(paths):
            self._store.delete(path, deadline_s=deadline_s)


_Landing = _Final | _Plain


def clean_export(store: Store, *, before_s: float) -> int:
    """Delete what a dead export has left, for people who do not come back to the place.

    Args:
        store: at the place.
        before_s: an export that has written something since may still be alive, seconds since 1970.

    Returns:
        How many objects there were.

    Raises:
        ConditionError: another export has just begun.
        StorageError: the store cannot be used.
    """
    found = {item.key: item for item in store.list()}
    if MARK not in found:
        return 0
    named = _marked(store)
    doomed = [item for key, item in found.items() if key in named]
    if max(item.modified_s for item in [found[MARK], *doomed]) >= before_s:
        return 0
    # Taken over first, so that an export that is alive after all hears of it.
    taken = json.dumps({"files": sorted(named)}).encode()
    store.write(MARK, taken, condition=Condition(version=found[MARK].version))
    store.sweep(chosen=named.__contains__)
    for item in doomed:
        store.delete(item.key)
    store.delete(MARK)
    return len(doomed) + 1


def size_of(file: ModelFile) -> int:
    """Bytes of a file.

    Raises:
        OSError: it is gone.
    """
    return file.source.size_bytes if isinstance(file.source, Content) else file.source.stat().st_size


def _marked(store: Store) -> set[str]:
    """What the export that marks the place writes there."""
    paths: Any = _mark_of(store).get("files")
    named = cast("list[Any]", paths) if isinstance(paths, list) else []
    return {path for path in named if isinstance(path, str) and path != MARK}


def _mark_of(store: Store, deadline_s: float | None = None) -> dict[str, Any]:
    with contextlib.suppress(ObjectNotFoundError, ValueError):
        length = min(store.stat(MARK, deadline_s=deadline_s).size_bytes, _MAX_MARK_BYTES)
        mark: Any = json.loads(store.read(MARK, length=length, deadline_s=deadline_s).tobytes())
        if isinstance(mark, dict):
            return cast("dict[str, Any]", mark)
    return {}
