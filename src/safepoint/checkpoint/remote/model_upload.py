"""A model on its way into a run's object store, file by file, with nothing of it on a disk.

Promises: those of `remote`: it is there exactly while its manifest is, which is written last; a writer that was
replaced writes nothing more; what it leaves when it dies is marked, and cleaned up by the next start of the run, by
`safepoint checkpoints repair`, or by whoever writes the same name next.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.format.digest import FileDigest
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.local.commit import entry_of
from safepoint.checkpoint.local.upload_record import UploadRecord
from safepoint.checkpoint.remote.publish import Publisher
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.stream_digest import digesting
from safepoint.errors import CheckpointError, ObjectNotFoundError, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.storage.store import Content, Progress, Store

Describe = Callable[[tuple[FileEntry, ...]], Manifest]
"""Makes a manifest for files, which are sorted by path."""
ABANDON_WITHIN_S = 15.0
"""How long a writer that has failed tries to leave nothing behind."""
_NUM_TRIES = 3


class ModelUpload:
    """A model that is put together under one name of a claimed location.

    Args:
        remote: the location.
        name: such as `final`.
        sent: where to note what has arrived, so that a later upload of the same bytes is none; or None.
    """

    def __init__(self, remote: RemoteFolder, name: str, *, sent: UploadRecord | None = None) -> None:
        self._remote = remote
        self._name = name
        self._sent = sent
        self._publisher = Publisher(remote)
        self._arrived: dict[str, tuple[FileEntry, str]] = {}

    def begin(self) -> None:
        """Mark what is to come; what counts under this name now no longer does. It may be called again, to go on.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: somebody else's files lie under the name.
        """
        self._publisher.begin(self._name)

    def put(
        self,
        path: str,
        source: Path | Content,
        *,
        expected: FileEntry | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Upload one file; what this object has put there before, and is still there, is not sent again.

        Args:
            path: of the file, within the model.
            source: its bytes.
            expected: what they must be, where somebody knows.
            progress: told the bytes that are in the store.

        Raises:
            CheckpointError: they are not what was expected.
            ConflictError: another attempt has claimed the location.
            StorageError: they did not arrive.
        """
        store, key = self._remote.store, f"{self._name}/{path}"
        if self._is_there(path, key):
            if progress is not None:
                progress(self._arrived[path][0].size_bytes)
            return
        found = put_verified(store, key, source, expected=expected, fence=self._remote.fence, progress=progress)
        entry, version = entry_of(path, found), store.stat(key).version
        self._arrived[path] = entry, version
        if self._sent is not None:
            self._sent.add(entry, version)

    def _is_there(self, path: str, key: str) -> bool:
        if path not in self._arrived:
            return False
        entry, version = self._arrived[path]
        with contextlib.suppress(ObjectNotFoundError):
            found = self._remote.store.stat(key)
            return (found.version, found.size_bytes) == (version, entry.size_bytes)
        return False

    def commit(self, describe: Describe) -> Manifest:
        """Make everything that was put there count.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: something of it is no longer there.
        """
        manifest = describe(tuple(self._arrived[path][0] for path in sorted(self._arrived)))
        self._publisher.finish(self._name, manifest.to_bytes())
        return manifest

    def abandon(self) -> None:
        """Take away what has arrived, where that is possible; what is not is cleaned up later."""
        deadline_s = clock.monotonic_s() + ABANDON_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._remote.store.sweep(chosen=lambda key: key.startswith(f"{self._name}/"), deadline_s=deadline_s)
            self._remote.take_down(self._name, deadline_s=deadline_s)


def put_verified(
    store: Store,
    key: str,
    source: Path | Content,
    *,
    expected: FileEntry | None,
    fence: Callable[[], None] | None,
    progress: Progress | None,
) -> FileDigest:
    """Upload one object, digested on the way, so that nothing but what is expected ever stands under its key.

    A stream that is not what was expected is tried again: it may have been damaged on its way here, and what was not
    is not sent again.

    Args:
        store: where.
        key: likewise.
        source: the bytes.
        expected: what they must be, or None.
        fence: see `Store.upload`.
        progress: told the bytes that are in the store.

    Returns:
        What they are.

    Raises:
        CheckpointError: they are not what was expected.
        StorageError: they did not arrive, or cannot be read.
    """
    is_repeatable = isinstance(source, Content) and expected is not None
    for is_last in [False] * (_NUM_TRIES - 1 if is_repeatable else 0) + [True]:
        moved: list[int] = []
        try:
            return _put(store, key, source, expected, fence, _both(moved.append, progress))
        except CheckpointError:
            if is_last:
                raise
            if progress is not None:
                progress(-sum(moved))
    raise AssertionError  # the last try has ended in one of two ways


def _put(
    store: Store,
    key: str,
    source: Path | Content,
    expected: FileEntry | None,
    fence: Callable[[], None] | None,
    progress: Progress,
) -> FileDigest:
    with digesting(source) as (passing, result):

        def check() -> None:
            if expected is not None and result().digest != expected.digest:
                raise CheckpointError(
                    f"{expected.path} is not what its manifest says: its content has changed",
                    hint="see `safepoint checkpoints verify --deep`",
                )
            if fence is not None:
                fence()

        try:
            store.upload(key, passing, fence=check, progress=progress)
            return result()
        except OSError as error:
            raise StorageError(f"{source} cannot be read: {error.strerror or error}") from error


def _both(first: Progress, second: Progress | None) -> Progress:
    def tell(num_bytes: int) -> None:
        first(num_bytes)
        if second is not None:
            second(num_bytes)

    return tell
