"""The commit in an object store: under a name of a run's location, files first and the manifest last (docs/adr/0007).

Promises: a checkpoint is there exactly while its manifest is. A writer that was replaced by a newer attempt writes
nothing more. What a writer leaves when it dies is marked; the next start of the run, `safepoint checkpoints repair`,
or the next writer of the same name deletes it.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safepoint.checkpoint.commit import Record
from safepoint.checkpoint.format.digest import PART_BYTES
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import SourceFile, UploadRecord, upload_verified
from safepoint.errors import ConditionError, ManifestError, ObjectNotFoundError, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.units import printable
from safepoint.storage.store import ABSENT, Condition, Progress

DISCARD_WITHIN_S = 15.0
"""How long a writer that has failed tries to delete what it has uploaded."""
_NUM_THREADS = 4
_SMALL_STREAM_BYTES = 4 << 20


class StoreDestination:
    """One name of a claimed location; see `safepoint.checkpoint.commit.Destination`.

    Args:
        remote: the location.
        name: such as `checkpoint-20` or `final`.
        sent: remembers what was uploaded, for a later writer of the same name; None for this object alone.
        deadline_s: when to give up, by the monotonic clock.
    """

    def __init__(
        self, remote: RemoteFolder, name: str, *, sent: UploadRecord | None = None, deadline_s: float | None = None
    ) -> None:
        self._remote = remote
        self._store = remote.store
        self._name = name
        self._sent = sent or UploadRecord(None)
        self._deadline_s = deadline_s
        self._entries: dict[str, FileEntry] = {}
        self._manifest: Manifest | None = None

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """What was put there, sorted by path."""
        return tuple(self._entries[path] for path in sorted(self._entries))

    def begin(self, manifest: Manifest | None = None) -> bool:
        """Mark the name as unfinished. Unless `manifest` extends it, what is committed there stops counting.

        A caller that failed may call it again, to continue.

        Args:
            manifest: of what is going to be committed, where that is known.

        Returns:
            False when the store has just this manifest; nothing was changed.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: there are files under the name that Safepoint has not written.
        """
        present = self._remote.bytes_of_manifest(self._name, deadline_s=self._deadline_s)
        if manifest is not None and present == manifest.to_bytes():
            return False
        if present is None:
            self._refuse_foreign()
        self._remote.fence(deadline_s=self._deadline_s)
        self._store.write(f"{UNFINISHED}/{self._name}", b"", deadline_s=self._deadline_s)
        if present is not None and not _extends(manifest, present):
            # Another node that does the same cannot delete what this one helps to commit: its part is still missing.
            self._store.delete(f"{self._name}/{MANIFEST_NAME}", deadline_s=self._deadline_s)
        return True

    def _refuse_foreign(self) -> None:
        if self._name in self._remote.unfinished(deadline_s=self._deadline_s):
            return
        found = next(iter(self._store.list(self._name, deadline_s=self._deadline_s)), None)
        # Asked again: another node of this run may have begun in between.
        if found is not None and self._name not in self._remote.unfinished(deadline_s=self._deadline_s):
            raise StorageError(
                f"{self._remote.where(self._name)} holds files that Safepoint has not written, such as "
                f"{printable(found.key)}; nothing was written there",
                hint="move them away, or name another location",
            )

    def put(self, file: SourceFile, progress: Progress | None = None) -> None:
        """Upload one file; what is there already, with this content, is not sent again.

        Raises:
            CheckpointError: the content is not what its manifest entry names.
            ConflictError: another attempt has claimed the location.
            StorageError: the store did not take it, or the source cannot be read.
        """
        key = f"{self._name}/{file.path}"
        known = file.expected or self._entries.get(file.path)
        version = None if known is None else self._sent.version_of(known)
        if known is not None and version is not None:
            with contextlib.suppress(ObjectNotFoundError):
                found = self._store.stat(key, deadline_s=self._deadline_s)
                if (found.version, found.size_bytes) == (version, known.size_bytes):
                    self._entries[file.path] = known
                    if progress is not None:
                        progress(known.size_bytes)
                    return
        entry = upload_verified(
            self._store,
            key,
            file,
            fence=lambda: self._remote.fence(deadline_s=self._deadline_s),
            progress=progress,
            deadline_s=self._deadline_s,
        )
        self._entries[file.path] = entry
        self._sent.add(entry, self._store.stat(key, deadline_s=self._deadline_s).version)

    def put_all(self, files: Sequence[SourceFile], progress: Progress | None = None) -> None:
        """Upload several files, small ones side by side: each is mostly waiting. Large ones are sent in parts.

        Raises:
            See `put`.
        """
        put = functools.partial(self.put, progress=progress)
        large = [file for file in files if not _is_small(file)]
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-upload") as threads:
            # Raises what the first file that failed has raised, and cancels the rest.
            list(threads.map(put, [file for file in files if _is_small(file)]))
        for file in large:
            put(file)

    def end_uploads(self, paths: Iterable[str]) -> None:
        """End uploads of these files by writers that were replaced, and make sure that this one was not."""
        keys = {f"{self._name}/{path}" for path in paths}
        self._store.sweep(only=keys.__contains__, deadline_s=self._deadline_s)
        self._remote.fence(deadline_s=self._deadline_s)

    def prepare(self, record: Record | None) -> None:
        """See `Destination`; `record` is the manifest, whose files were put there by this writer or another one.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: the files are not all there.
        """
        if not isinstance(record, Manifest):
            raise TypeError("a store is given the manifest of a whole checkpoint")
        # Ends uploads of a writer that was replaced; then deletes what an earlier checkpoint of this step has left.
        self._store.sweep(only=lambda key: key.startswith(f"{self._name}/"), deadline_s=self._deadline_s)
        faults = compare_listing(record.files, self._remote.files_of(self._name, deadline_s=self._deadline_s))
        if faults:
            raise StorageError(
                f"{self._remote.where(self._name)} is not committed, because another writer changed it: {faults[0]}"
            )
        named = {MANIFEST_NAME, *(entry.path for entry in record.files)}
        self._remote.delete_but(self._name, named, self._deadline_s)
        self._manifest = record

    def publish(self) -> None:
        """See `Destination`: writes the manifest, on the condition that no other writer has written one meanwhile."""
        assert self._manifest is not None
        key, data, condition = f"{self._name}/{MANIFEST_NAME}", self._manifest.to_bytes(), ABSENT
        with contextlib.suppress(ObjectNotFoundError):  # of the same checkpoint with fewer files
            condition = Condition(version=self._store.stat(key, deadline_s=self._deadline_s).version)
        self._remote.fence(deadline_s=self._deadline_s)
        try:
            self._store.write(key, data, condition=condition, deadline_s=self._deadline_s)
        except ConditionError:
            # Another node of this attempt may have written the same.
            if self._remote.bytes_of_manifest(self._name, deadline_s=self._deadline_s) != data:
                raise
        self._remote.note_commit(self._manifest.step)
        with contextlib.suppress(StorageError):  # it is committed; the next start deletes the marks
            self._remote.forget(self._name, self._deadline_s)

    def discard(self) -> None:
        """See `Destination`; what cannot be deleted now stays marked as unfinished."""
        deadline_s = clock.monotonic_s() + DISCARD_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._store.sweep(only=lambda key: key.startswith(f"{self._name}/"), deadline_s=deadline_s)
            self._remote.delete(self._name, deadline_s=deadline_s)


def _is_small(file: SourceFile) -> bool:
    """Whether it is sent beside others; a stream takes memory, and a file does not."""
    return file.size_bytes <= (PART_BYTES if isinstance(file.source, Path) else _SMALL_STREAM_BYTES)


def _extends(manifest: Manifest | None, present: bytes) -> bool:
    """Whether the manifest in the store stays true while further files of `manifest` arrive beside its own."""
    with contextlib.suppress(ManifestError):
        return manifest is not None and set(Manifest.from_bytes(present).files) < set(manifest.files)
    return False
