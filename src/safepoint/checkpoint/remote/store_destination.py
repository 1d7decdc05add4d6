"""The commit in an object store: uploads the files of a checkpoint, and writes its manifest last (docs/adr/0007).

Promises: a checkpoint counts as being in the store exactly while its manifest is there. A writer that was replaced by
a newer attempt writes nothing more. Before a writer uploads files, it lists them in a mark: an object in
`.safepoint/unfinished` (see `marks`). If the writer dies, the next start of the run, `safepoint checkpoints repair`,
or the next writer of the same name deletes the files that the mark lists.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safepoint.checkpoint.commit import Record
from safepoint.checkpoint.format.digest import PART_BYTES
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, is_of_newer_release
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import SourceFile, UploadRecord, upload_verified
from safepoint.errors import (
    ConditionError,
    ManifestError,
    ObjectNotFoundError,
    SafepointError,
    StorageError,
    printable,
)
from safepoint.foundation import clock
from safepoint.storage.store import ABSENT, Condition, Progress

DISCARD_WITHIN_S = 15.0
"""How many seconds a failed writer tries to delete the files that it has uploaded."""
_NUM_THREADS = 4
_SMALL_STREAM_BYTES = 4 << 20


class StoreDestination:
    """The prefix of one checkpoint or model in a claimed location; see `safepoint.checkpoint.commit.Destination`.

    Args:
        remote: the location.
        name: the name of the checkpoint or model, such as `checkpoint-20` or `final`.
        sent: the files that earlier writers of the name have uploaded; `put` adds each file that it uploads. None:
            there were no earlier writers.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.
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
        # If the store has this manifest already, but not all of its files: the paths of the files that have the right
        # size. In all other cases None.
        self._completed: frozenset[str] | None = None

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The uploaded files, sorted by path."""
        return tuple(self._entries[path] for path in sorted(self._entries))

    def begin(self, manifest: Manifest | None = None, *, files: Mapping[str, int] | None = None) -> bool:
        """Write the mark, so that the name counts as unfinished. After a failure the caller may call this again, to
        continue.

        A committed checkpoint of this name loses its manifest, so that it is no longer a checkpoint. There are two
        exceptions: `manifest` is the checkpoint's own manifest, or its own manifest with more files. If it is the
        checkpoint's own manifest, and the store lacks some of its files, `put` uploads only the missing files.

        Args:
            manifest: the manifest of the checkpoint that is going to be committed, if it is known.
            files: path → size of the files that are going to be put; None for the files of `manifest`.

        Returns:
            False when the store has exactly this manifest, and all of its files; then nothing was changed.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: a later release wrote the checkpoint, or there are files under the name that Safepoint has
                not written.
        """
        present = self._remote.bytes_of_manifest(self._name, deadline_s=self._deadline_s)
        if manifest is not None and present == manifest.to_bytes():
            found = self._remote.files_of(self._name, deadline_s=self._deadline_s)
            faults = compare_listing(manifest.files, found)
            if not faults:
                return False
            self._completed = frozenset(found.keys() - {fault.file for fault in faults})
        if present is None:
            self._refuse_foreign()
        elif is_of_newer_release(present):
            raise StorageError(
                f"a later release of safepoint wrote {self._remote.where(self._name)}; nothing was written there",
                hint="use that release, or name another location",
            )
        if files is None:
            files = {entry.path: entry.size_bytes for entry in manifest.files} if manifest is not None else {}
        written: Collection[str] = ()
        if present is not None and self._completed is None:
            # An invalid manifest does not say which files Safepoint has written. A stranger may have put it into the
            # checkpoint of another program. So the other files stay, unless a new file replaces them.
            written = self._remote.files_of_manifest(self._name, self._deadline_s) or (MANIFEST_NAME,)
        self._remote.mark(self._name, files, existing=written, deadline_s=self._deadline_s)
        if present is not None and self._completed is None and not added_to(present, manifest):
            # Several nodes may delete the old manifest. None of them deletes the new one, which is written only after
            # all nodes have uploaded their parts.
            self._store.delete(f"{self._name}/{MANIFEST_NAME}", deadline_s=self._deadline_s)
        return True

    def _refuse_foreign(self) -> None:
        if self._name in self._remote.unfinished(deadline_s=self._deadline_s):
            return
        found = next(iter(self._store.list(self._name, deadline_s=self._deadline_s)), None)
        # The mark is looked for again, because another node of this run may have begun in between.
        if found is not None and self._name not in self._remote.unfinished(deadline_s=self._deadline_s):
            raise StorageError(
                f"{self._remote.where(self._name)} holds files that Safepoint has not written, such as "
                f"{printable(found.key)}; nothing was written there",
                hint="move them away, or name another location",
            )

    def put(self, file: SourceFile, progress: Progress | None = None) -> None:
        """Upload one file, unless the store has it already with this content.

        Raises:
            CheckpointError: the content differs from the file's manifest entry.
            ConflictError: another attempt has claimed the location.
            StorageError: the upload failed, or the source cannot be read.
        """
        key = f"{self._name}/{file.path}"
        if self._completed is not None and file.expected is not None and file.path in self._completed:
            self._entries[file.path] = file.expected
            if progress is not None:
                progress(file.expected.size_bytes)
            return
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
        """Upload several files: first the small ones in parallel, then the large ones, which are sent in parts.

        Raises:
            SafepointError: see `put`.
        """
        put = functools.partial(self.put, progress=progress)
        large = [file for file in files if not _is_small(file)]
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="safepoint-upload") as threads:
            # Raises the first error, and cancels the rest.
            list(threads.map(put, [file for file in files if _is_small(file)]))
        for file in large:
            put(file)

    def end_uploads(self, paths: Iterable[str]) -> None:
        """Abort the unfinished uploads of `paths` by replaced writers, and check that this writer is not replaced."""
        self._remote.sweep([self._name], only=set(paths).__contains__, deadline_s=self._deadline_s)
        self._remote.fence(deadline_s=self._deadline_s)

    def prepare(self, record: Record | None) -> None:
        """See `Destination`. `record` is a manifest. This writer and other nodes' writers have uploaded its files.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: a file is missing, or has another size.
        """
        if not isinstance(record, Manifest):
            raise TypeError("a store needs the manifest of a whole checkpoint")
        # After this sweep, no upload of a replaced writer can become visible. `delete_marked` below deletes the files
        # of an earlier checkpoint of this step.
        self._remote.sweep([self._name], deadline_s=self._deadline_s)
        faults = compare_listing(record.files, self._remote.files_of(self._name, deadline_s=self._deadline_s))
        if faults:
            raise StorageError(
                f"{self._remote.where(self._name)} is not committed, because another writer changed it: {faults[0]}"
            )
        named = {MANIFEST_NAME, *(entry.path for entry in record.files)}
        self._remote.delete_marked(self._name, but=named, keep_mark=True, deadline_s=self._deadline_s)
        self._manifest = record

    def publish(self) -> None:
        """See `Destination`: write the manifest, on the condition that no other writer has written one meanwhile."""
        assert self._manifest is not None
        key, data, condition = f"{self._name}/{MANIFEST_NAME}", self._manifest.to_bytes(), ABSENT
        # If there is a manifest, it belongs to the same checkpoint, and lists fewer files.
        with contextlib.suppress(ObjectNotFoundError):
            condition = Condition(version=self._store.stat(key, deadline_s=self._deadline_s).version)
        self._remote.fence(deadline_s=self._deadline_s)
        try:
            self._store.write(key, data, condition=condition, deadline_s=self._deadline_s)
        except ConditionError:
            # Another node of this attempt may have written the same manifest.
            if self._remote.bytes_of_manifest(self._name, deadline_s=self._deadline_s) != data:
                raise
        self._remote.note_commit(self._manifest.step)
        # Ignore errors: the checkpoint is committed, and the next start deletes the marks.
        with contextlib.suppress(StorageError):
            self._remote.forget(self._name, self._deadline_s)

    def discard(self) -> None:
        """See `Destination`; files that cannot be deleted now stay marked as unfinished.

        If this writer only had to upload missing files of a committed checkpoint, nothing is deleted.
        """
        deadline_s = clock.monotonic_s() + DISCARD_WITHIN_S
        with contextlib.suppress(SafepointError):
            self._remote.sweep([self._name], deadline_s=deadline_s)
            if self._completed is None:
                self._remote.delete(self._name, deadline_s=deadline_s)


def _is_small(file: SourceFile) -> bool:
    """Whether to send the file in parallel with others. Streams need memory, so the limit for them is lower."""
    return file.size_bytes <= (PART_BYTES if isinstance(file.source, Path) else _SMALL_STREAM_BYTES)


def added_to(present: bytes, manifest: Manifest | None) -> list[FileEntry]:
    """The files that `manifest` adds to the manifest in the store; empty if the two differ in anything else."""
    with contextlib.suppress(ManifestError):
        found = Manifest.from_bytes(present)
        if manifest is not None and dataclasses.replace(manifest, files=found.files) == found:
            before = set(found.files)
            is_more = before < set(manifest.files)
            return [entry for entry in manifest.files if entry not in before] if is_more else []
    return []
