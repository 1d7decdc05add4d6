"""An object store: S3 and compatible servers, Google Cloud Storage, or Azure.

`safepoint.storage.s3` sends the requests to S3. The library obstore sends the requests to Google and Azure
(`library_bucket`).
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safepoint.errors import ConditionError, ObjectNotFoundError, StorageError
from safepoint.foundation import clock
from safepoint.storage import failures
from safepoint.storage.bucket import Bucket
from safepoint.storage.location import Location, Scheme
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.answers import SLOWEST_BYTES_PER_S
from safepoint.storage.s3.bucket import S3Bucket
from safepoint.storage.s3.credentials import find_keys
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S, retry
from safepoint.storage.store import (
    MOST_READ_BYTES,
    WHOLE_BYTES,
    Condition,
    Content,
    OpenFile,
    Progress,
    Sink,
    StoredObject,
    check_key,
    check_length,
    is_own_key,
    opened_source,
)

_NUM_FENCED_TRIES = 5


class ObjectStore:
    """The objects below a prefix of a bucket.

    Args:
        location: `s3`, `gs` or `az`.
        options: the options that are not in the location's URI.

    Raises:
        StorageError: the package that `gs` and `az` need is not installed.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self.location = location
        """See `Store`."""
        self._options = options
        self._requests = _bucket_of(location, options)

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        """See `Store`."""
        if prefix:
            check_key(prefix)
        root = self._full("")
        found = self._requests.objects(f"{root}{prefix}/" if prefix else root, deadline_s=deadline_s)
        # One copy of each name is kept: the key of the dictionary is also the key of its object.
        named: dict[str, StoredObject] = {}
        for item in found:
            key = item.key[len(root) :]
            if is_own_key(key, self.location):
                named[key] = dataclasses.replace(item, key=key)
        for key in sorted(named):
            yield named[key]

    def unsorted(self, *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        """Yield all objects as they arrive, in any order, including objects whose names are not valid keys.

        The names are not kept, so a caller that only adds up sizes needs no memory for them.
        """
        root = self._full("")
        for item in self._requests.objects(root, deadline_s=deadline_s):
            yield dataclasses.replace(item, key=item.key[len(root) :])

    def stat(self, key: str, *, deadline_s: float | None = None) -> StoredObject:
        """See `Store`."""
        check_key(key)
        return dataclasses.replace(self._requests.head(self._full(key), deadline_s=deadline_s), key=key)

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        most_bytes: int = MOST_READ_BYTES,
        deadline_s: float | None = None,
    ) -> memoryview:
        """See `Store`."""
        check_key(key)
        if length is None:
            full = self._full(key)
            rest = self._requests.get_rest(full, start=start, most_bytes=most_bytes, deadline_s=deadline_s)
            return memoryview(rest).toreadonly()
        found = bytearray()
        self.stream(key, found.extend, start=start, length=length, deadline_s=deadline_s)
        return memoryview(found).toreadonly()

    def stream(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None = None) -> None:
        """See `Store`."""
        check_key(key)
        if length > 0:
            self._requests.get(self._full(key), sink, start=start, length=length, deadline_s=deadline_s)

    def write(
        self, key: str, data: bytes, *, condition: Condition | None = None, deadline_s: float | None = None
    ) -> str:
        """See `Store`."""
        check_key(key)
        num_tries, md5 = 0, hashlib.md5(data, usedforsecurity=False).hexdigest()

        def attempt(timeout_s: float) -> str:
            nonlocal num_tries, condition
            num_tries += 1
            try:
                version = self._requests.put(self._full(key), data, condition, within_s=timeout_s)
            except ConditionError:
                # An earlier try may have written the object, although its answer was lost. So compare the content.
                version = self._version_if_equal(key, data, deadline_s) if num_tries > 1 and condition else None
                if version is None:
                    raise
                return version
            if version.strip('"') == md5:
                return version
            condition = condition and Condition(version=version)  # the next try may replace only this try's version
            if self._version_if_equal(key, data, deadline_s) is None:
                name = f"{self.location.scheme}://{self.location.bucket}/{self._full(key)}"
                raise failures.changed_in_transit(f"PUT {name}")
            return version

        # A slow link is not an error: a request may take as long as its bytes need at the slowest accepted rate.
        try_s = self._options.request_timeout_s + len(data) / SLOWEST_BYTES_PER_S
        if deadline_s is None:
            deadline_s = clock.monotonic_s() + DEFAULT_WITHIN_S + try_s
        return retry(attempt, deadline_s=deadline_s, try_s=try_s)

    def _version_if_equal(self, key: str, data: bytes, deadline_s: float | None) -> str | None:
        found = self.stat(key, deadline_s=deadline_s)
        is_equal = (
            found.size_bytes == len(data) and bytes(self.read(key, length=len(data), deadline_s=deadline_s)) == data
        )
        return found.version if is_equal else None

    def upload(
        self,
        key: str,
        source: Path | OpenFile | Content,
        *,
        fence: Callable[[], None] | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """See `Store`."""
        check_key(key)
        with opened_source(source) as opened:
            if opened.size_bytes > WHOLE_BYTES:
                self._requests.upload(self._full(key), opened, fence=fence, progress=progress, deadline_s=deadline_s)
                return
            data = _gathered(opened) if isinstance(opened, Content) else _read_small(opened)
        self._upload_small(key, data, fence, deadline_s)
        if progress is not None and data:
            progress(len(data))

    def _upload_small(
        self, key: str, data: bytes, fence: Callable[[], None] | None, deadline_s: float | None
    ) -> None:
        if fence is None:
            self.write(key, data, deadline_s=deadline_s)
            return
        # The write requires the version that the object had before the fence. If another writer has changed the
        # object since, the write fails, and the fence is checked again.
        for num_left in reversed(range(_NUM_FENCED_TRIES)):
            found = self._stat_or_none(key, deadline_s)
            fence()
            try:
                self.write(key, data, condition=Condition(version=found and found.version), deadline_s=deadline_s)
            except ConditionError:
                if not num_left:
                    raise
            else:
                return

    def _stat_or_none(self, key: str, deadline_s: float | None) -> StoredObject | None:
        try:
            return self.stat(key, deadline_s=deadline_s)
        except ObjectNotFoundError:
            return None

    def delete(self, key: str, *, deadline_s: float | None = None) -> None:
        """See `Store`."""
        check_key(key)
        with contextlib.suppress(ObjectNotFoundError):
            self._requests.delete(self._full(key), deadline_s=deadline_s)

    def sweep(
        self,
        *,
        only: Callable[[str], bool] = lambda key: True,
        keys: Iterable[str] = (),
        below: str = "",
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """See `Store`. On Google and Azure, nothing is deleted (see `LibraryBucket.sweep`)."""
        root = self._full("")
        return self._requests.sweep(
            f"{root}{below}/" if below else root,
            only=lambda key: only(key.removeprefix(root)),
            keys=map(self._full, keys),
            begun_before_s=begun_before_s,
            deadline_s=deadline_s,
        )

    def _full(self, key: str) -> str:
        return f"{self.location.path}/{key}" if self.location.path else key


def _bucket_of(location: Location, options: StorageOptions) -> Bucket:
    if location.scheme is Scheme.S3:
        return S3Bucket(location.bucket, options, find_keys(options, os.environ))
    try:
        from safepoint.storage.library.library_bucket import LibraryBucket
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{location} cannot be used: {location.scheme}:// needs the package obstore, and the module {error.name} "
            "is not installed",
            hint=f"pip install 'safepoint[{location.extra}]'; on a cluster, use an image with obstore",
        ) from error
    return LibraryBucket(location, options)


def _read_small(file: OpenFile) -> bytes:
    """The bytes of a file that was small when it was opened. It may have grown to any size since then."""
    data = bytearray()
    while block := os.pread(file.descriptor, file.size_bytes + 1 - len(data), len(data)):
        data += block
    if len(data) != file.size_bytes:
        raise StorageError(f"{file.name} changed while it was uploaded; it is not in the store")
    return bytes(data)


def _gathered(content: Content) -> bytes:
    """The bytes of a small stream."""
    data = bytearray()

    def take(block: memoryview) -> None:
        data.extend(block)
        if len(data) > content.size_bytes:  # raise the error now, before the stream fills the memory
            check_length(content, len(data))

    content.write_to(take)
    check_length(content, len(data))
    return bytes(data)
