"""Uploads single files and digests them on the way, so that a file with unexpected content never becomes visible.

`UploadRecord` records which files were uploaded, so that the same content is not uploaded twice. `patience_s` says
how long failed uploads are retried.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from safepoint.checkpoint.format.digest import FileDigest, FileDigester, digest_open_file
from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, FileEntry
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import CheckpointError, SafepointError, StorageError, TransientError
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import open_file, read_regular
from safepoint.storage.store import Content, OpenFile, Progress, Sink, Store, opened

_NUM_TRIES = 3
LONGEST_PATIENCE_S = 600.0
"""How long a failed upload is retried when the store does not answer."""
_PATIENCE_WITH_REFUSALS_S = 30.0
"""How long a failed upload is retried when the store refuses requests."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The pause between two tries doubles from the first value up to the second."""
_MAX_RECORD_BYTES = 2 * MAX_MANIFEST_BYTES
"""Larger than a manifest, because a line of the record may be longer than the file's entry in a manifest."""
_Result = Callable[[], FileDigest]
"""Returns the digest of the bytes that were sent; called after all bytes were sent. For a file, the call may wait, or
raise OSError."""


class SourceFile(NamedTuple):
    """A file that is to be uploaded.

    Args:
        path: the path within the checkpoint or model.
        source: its bytes.
        expected: its entry in a manifest; None if there is no entry.
        below: a folder above the file `source`; the folders between the two must not be links.
    """

    path: str
    source: Path | Content
    expected: FileEntry | None = None
    below: Path | None = None

    @property
    def size_bytes(self) -> int:
        """The size; OSError when it has to be read from the file, and the file is gone."""
        if self.expected is not None:
            return self.expected.size_bytes
        return self.source.size_bytes if isinstance(self.source, Content) else self.source.lstat().st_size


def upload_verified(
    store: Store,
    key: str,
    file: SourceFile,
    *,
    fence: Callable[[], None] | None = None,
    progress: Progress | None = None,
    deadline_s: float | None = None,
) -> FileEntry:
    """Upload one file. It becomes visible only if it matches its manifest entry.

    A stream that does not match may have been damaged on its way to this machine. So the stream is read and sent
    again, at most three times in all. On S3, parts that are in the store already are not sent again.

    A file is opened once, and no link below `SourceFile.below` is followed. The bytes that are sent, the digest and
    the checksums for the store all come from this open file, even if another process replaces the file meanwhile.

    Args:
        store: the store that receives the file.
        key: the file's key in the store.
        file: the file, with its manifest entry if there is one.
        fence: see `Store.upload`.
        progress: receives the number of bytes that have reached the store since its last call; a negative number
            withdraws bytes that are going to be sent again.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

    Returns:
        The entry of the uploaded file.

    Raises:
        CheckpointError: the content differs from the manifest entry.
        StorageError: the upload failed, or the source cannot be read.
    """
    moved: list[int] = []

    def advance(num_bytes: int) -> None:
        moved.append(num_bytes)
        if progress is not None:
            progress(num_bytes)

    if isinstance(file.source, Content) and file.expected is not None:
        for _ in range(_NUM_TRIES - 1):
            try:
                return _upload(store, key, file, fence, advance, deadline_s)
            except CheckpointError:
                if progress is not None:
                    progress(-sum(moved))
                moved.clear()
    return _upload(store, key, file, fence, advance, deadline_s)


def _upload(
    store: Store,
    key: str,
    file: SourceFile,
    fence: Callable[[], None] | None,
    progress: Progress,
    deadline_s: float | None,
) -> FileEntry:
    try:
        with _digesting(file) as (passing, result):

            def check() -> None:
                if file.expected is not None and FileEntry.of(file.path, result()) != file.expected:
                    raise _changed(file)
                if fence is not None:
                    fence()

            store.upload(key, passing, fence=check, progress=progress, deadline_s=deadline_s)
            return FileEntry.of(file.path, result())
    except OSError as error:
        raise StorageError(f"{file.source} cannot be read: {error.strerror or error}") from error


def _changed(file: SourceFile) -> CheckpointError:
    return CheckpointError(
        f"{file.path} has changed since its checkpoint was committed; it was not uploaded",
        hint="`safepoint checkpoints verify --deep` lists the faults",
    )


@contextlib.contextmanager
def _digesting(file: SourceFile) -> Generator[tuple[OpenFile | Content, _Result]]:
    """Yield the source to upload in place of `file.source`, and a function that returns the digest of its bytes.

    A file is read a second time, in parallel with its upload; a stream is digested while it is sent.
    """
    source = file.source
    if isinstance(source, Content):
        yield _passing(source)
        return
    has_ended = threading.Event()

    def check_running(count: int) -> None:
        if has_ended.is_set():
            raise OSError(f"{source} is no longer read")

    with opened(source, below=file.below) as one:
        if file.expected is not None and one.size_bytes != file.expected.size_bytes:
            raise _changed(file)

        def digest() -> FileDigest:
            return digest_open_file(one.descriptor, check_running, expected_bytes=one.size_bytes)

        with ThreadPoolExecutor(1, thread_name_prefix="safepoint-digest") as thread:
            try:
                yield one, thread.submit(digest).result
            finally:
                has_ended.set()


def _passing(source: Content) -> tuple[Content, _Result]:
    digesters: list[FileDigester] = []

    def write_to(sink: Sink) -> None:
        digester = FileDigester()

        def take(block: memoryview) -> None:
            digester.update(block)
            sink(block)

        source.write_to(take)
        digesters.append(digester)

    def result() -> FileDigest:
        return digesters[-1].result()

    return Content(size_bytes=source.size_bytes, write_to=write_to), result


class UploadRecord:
    """Which files of a checkpoint are in the store, with which content and version.

    Args:
        path: the file that keeps the record for the next process, one JSON line for each uploaded file; None keeps
            it in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[str, str]] = {}
        if path is not None:
            with contextlib.suppress(OSError):
                for line in read_regular(path, _MAX_RECORD_BYTES).splitlines():
                    with contextlib.suppress(ValueError, KeyError):  # a crash may have cut off a line
                        noted = parse_object(line)
                        self._versions[str(noted["path"])] = str(noted["digest"]), str(noted["version"])

    def version_of(self, entry: FileEntry) -> str | None:
        """The version of the file in the store; None if the file was not uploaded with the content of `entry`."""
        digest, version = self._versions.get(entry.path, ("", ""))
        return version if digest == entry.digest else None

    def add(self, entry: FileEntry, version: str) -> None:
        """Record that the file is in the store as `version`."""
        # If the record cannot be written, the next process sends the file again.
        with self._lock, contextlib.suppress(OSError):
            self._versions[entry.path] = entry.digest, version
            if self._path is not None:
                line = json.dumps({"path": entry.path, "digest": entry.digest, "version": version})
                descriptor = open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                try:
                    # Begin with a line break, because a crash may have cut off the line before.
                    os.write(descriptor, f"\n{line}\n".encode())
                finally:
                    os.close(descriptor)

    def remove(self) -> None:
        """Delete the record. Call this when the checkpoint is committed in the store."""
        with self._lock, contextlib.suppress(OSError):
            self._versions = {}
            if self._path is not None:
                no_links.unlink(self._path)


def upload_record(output: OutputFolder, name: str) -> UploadRecord:
    """The record of the checkpoint or model called `name` in this folder."""
    return UploadRecord(output.control / f"upload-{name}.json")


def patience_s(error: SafepointError) -> float:
    """For how many seconds to retry, counted from the last byte that reached the store.

    Args:
        error: why the last try has failed.
    """
    return LONGEST_PATIENCE_S if isinstance(error, TransientError) else _PATIENCE_WITH_REFUSALS_S
