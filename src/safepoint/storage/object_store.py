"""An object store: S3 and compatible servers, Google Cloud Storage, Azure.

With keys for S3 (`safepoint.storage.s3.credentials`), `safepoint.storage.s3` sends the requests that list objects,
read ranges and upload large files. It can continue an interrupted upload. obstore sends all other requests, and all
requests with an instance's role or to the other object stores. There, an interrupted upload starts again.

This module repeats failed requests itself, except for streams (`_upload_stream`): obstore's ten retries would hide
faults and ignore the deadline.
"""

import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import PreconditionError

from safepoint.errors import AccessDeniedError, ConditionError, ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage import failures
from safepoint.storage.clients import Client, make_client
from safepoint.storage.location import Location, Scheme
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.answers import SLOWEST_BYTES_PER_S
from safepoint.storage.s3.credentials import Keys, find_keys
from safepoint.storage.s3.multipart import STREAM_MEMORY_BYTES, part_bytes_of, upload_in_parts
from safepoint.storage.s3.requests import FilePart, S3Requests, UploadId, md5_of
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S, retry
from safepoint.storage.store import (
    WHOLE_BYTES,
    Condition,
    Content,
    Progress,
    Sink,
    StoredObject,
    check_key,
    check_length,
    is_own_key,
)

_SHORTEST_TRY_S = 0.25
_NUM_FENCED_TRIES = 5
_NUM_LISTINGS = 8
_BLOCK_BYTES = 16 << 20
_T = TypeVar("_T")


class ObjectStore:
    """The objects below a prefix of a bucket.

    Args:
        location: `s3`, `gs` or `az`.
        options: how to reach it.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self.location = location
        """See `Store`."""
        self._options = options
        self._clients: dict[float, Client] = {}
        self._keys_of_clients: Keys | None = None
        self._keys = find_keys(options, os.environ) if location.scheme is Scheme.S3 else None
        self._lock = threading.Lock()
        # The name of the value that a conditional write compares. Google's stores require the object's generation.
        self._version_field = "version" if location.scheme is Scheme.GS else "e_tag"
        self._requests = S3Requests(location.bucket, options, self._keys) if self._keys is not None else None

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        """See `Store`."""
        if prefix:
            check_key(prefix)
        if self._requests is not None:
            # Not through obstore, whose listing fails at the first name that is not a valid path.
            root = self._full("")
            found = self._requests.objects(f"{root}{prefix}/" if prefix else root, deadline_s=deadline_s)
            named = {item.key[len(root) :]: item for item in found}
            for key in sorted(named):
                if is_own_key(key, self.location):
                    yield dataclasses.replace(named[key], key=key)
            return

        def everything(client: Client) -> Sequence[Any]:
            pages: Any = obstore.list(client, prefix or None, chunk_size=1000)  # pyright: ignore[reportUnknownMemberType]
            return [item for page in pages for item in page]

        # One attempt reads all pages, because a listing that fails at a later page must not look complete.
        found = self._call("LIST", prefix, everything, deadline_s)
        for item in sorted(found, key=lambda item: item["path"]):
            yield self._object(item["path"], item)

    def stat(self, key: str, *, deadline_s: float | None = None) -> StoredObject:
        """See `Store`."""
        check_key(key)

        def head() -> StoredObject:
            return self._object(key, self._call("HEAD", key, lambda client: obstore.head(client, key), deadline_s))

        try:
            return head()
        except (ObjectNotFoundError, ConditionError, TransientError):
            raise
        except StorageError:
            # An answer to HEAD has no body, so it does not contain the reason of the failure. The answer to GET does.
            # If the reason is an expired key, `_call` fetches new keys, and `head` succeeds.
            self._call("GET", key, lambda client: obstore.get(client, key), deadline_s)
            return head()

    def read(
        self, key: str, *, start: int = 0, length: int | None = None, deadline_s: float | None = None
    ) -> memoryview:
        """See `Store`."""
        check_key(key)
        if length == 0:
            return memoryview(b"")
        if self._requests is not None and length is not None:
            # obstore would read the body of an error to its end, however long it is.
            found = bytearray()
            self._requests.get(self._full(key), found.extend, start=start, length=length, deadline_s=deadline_s)
            return memoryview(found).toreadonly()

        def get(client: Client) -> memoryview:
            if length is None:
                options: Any = {"range": {"offset": start}} if start else None
                return memoryview(obstore.get(client, key, options=options).bytes())
            data = memoryview(obstore.get_range(client, key, start=start, length=length))
            if len(data) != length:
                raise self._too_short(client, key, start + length)
            return data

        return self._call("GET", key, get, deadline_s, size_bytes=length or 0)

    def stream(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None = None) -> None:
        """See `Store`. Without keys, obstore reads, in blocks of `_BLOCK_BYTES`."""
        check_key(key)
        if self._requests is not None:
            self._requests.get(self._full(key), sink, start=start, length=length, deadline_s=deadline_s)
            return
        for begin in range(start, start + length, _BLOCK_BYTES):
            size_bytes = min(_BLOCK_BYTES, start + length - begin)
            sink(self.read(key, start=begin, length=size_bytes, deadline_s=deadline_s))

    def _too_short(self, client: Client, key: str, end: int) -> StorageError:
        size_bytes = obstore.head(client, key)["size"]
        if size_bytes < end:
            return StorageError(f"{self._name(key)} has {size_bytes} bytes, not {end}")
        return TransientError(f"the answer for {self._name(key)} was cut off")

    def write(
        self, key: str, data: bytes, *, condition: Condition | None = None, deadline_s: float | None = None
    ) -> str:
        """See `Store`."""
        check_key(key)
        num_tries, md5 = 0, hashlib.md5(data, usedforsecurity=False).hexdigest()

        def put(client: Client) -> str:
            nonlocal num_tries, condition
            num_tries += 1
            try:
                version = self._put(client, key, data, condition)
            except Exception as error:
                translated = failures.from_obstore(error, f"PUT {self._name(key)}")
                # An earlier try, whose answer was lost, may have written the object.
                if isinstance(translated, ConditionError) and num_tries > 1 and condition is not None:
                    version = self._version_if_equal(client, key, data)
                    if version is not None:
                        return version
                raise
            if version.strip('"') == md5:
                return version
            condition = condition and Condition(version=version)  # the next try may replace only what this one wrote
            if self._version_if_equal(client, key, data) is None:
                raise failures.changed_in_transit(f"PUT {self._name(key)}")
            return version

        return self._call("PUT", key, put, deadline_s, size_bytes=len(data))

    def _put(self, client: Client, key: str, data: bytes, condition: Condition | None) -> str:
        mode: Any = "overwrite"
        if condition is not None:
            mode = "create" if condition.version is None else {self._version_field: condition.version}
        try:
            return self._version(obstore.put(client, key, data, mode=mode, use_multipart=False))
        except PreconditionError:
            # Ceph RGW 16 compares If-Match with the ETag without quotes, but returns it with quotes.
            version = condition.version if condition is not None else None
            if self._version_field != "e_tag" or version is None or obstore.head(client, key)["e_tag"] != version:
                raise
            bare: Any = {"e_tag": version.strip('"')}
            return self._version(obstore.put(client, key, data, mode=bare, use_multipart=False))

    def _version_if_equal(self, client: Client, key: str, data: bytes) -> str | None:
        found = obstore.head(client, key)
        is_equal = found["size"] == len(data) and bytes(self.read(key, length=len(data))) == data
        return self._version(found) if is_equal else None

    def upload(
        self,
        key: str,
        source: Path | Content,
        *,
        fence: Callable[[], None] | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """See `Store`."""
        check_key(key)
        size_bytes = source.size_bytes if isinstance(source, Content) else source.stat().st_size
        if size_bytes > WHOLE_BYTES and self._requests is not None:
            self._upload_in_parts(self._requests, key, source, size_bytes, fence, progress, deadline_s)
            return
        if size_bytes <= WHOLE_BYTES:
            data = _gathered(source) if isinstance(source, Content) else source.read_bytes()
            self._upload_small(key, data, fence, deadline_s)
        elif isinstance(source, Content):
            self._upload_stream(key, source, fence, progress, deadline_s)
            return
        else:
            if fence is not None:
                fence()
            chunk = part_bytes_of(size_bytes, is_stream=False)
            # obstore reads a file that is passed as a `Path` itself, part by part.
            self._call(
                "PUT",
                key,
                lambda client: obstore.put(client, key, source, chunk_size=chunk),
                deadline_s,
                size_bytes=size_bytes,
            )
            self._read_back(key, md5_of(FilePart(source, 0, size_bytes)), size_bytes, deadline_s)
        if progress is not None and size_bytes:
            progress(size_bytes)

    def _upload_stream(
        self,
        key: str,
        content: Content,
        fence: Callable[[], None] | None,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        """Upload with obstore, which repeats requests itself here, because a stream cannot be started again."""
        what, done, md5 = f"PUT {self._name(key)}", 0, hashlib.md5(usedforsecurity=False)
        part_bytes = part_bytes_of(content.size_bytes, is_stream=True)
        client = make_client(
            self.location, self._options, self._options.request_timeout_s, keys=None, is_repeating=True
        )

        def check_deadline() -> None:
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise TransientError(f"{what}: {done} of {content.size_bytes} bytes were sent before the deadline")

        # The writer is not used as a context manager, because that would complete the object even after an error.
        writer = obstore.open_writer(
            client, key, buffer_size=part_bytes, max_concurrency=max(1, STREAM_MEMORY_BYTES // part_bytes - 1)
        )

        def take(block: memoryview) -> None:
            nonlocal done
            check_deadline()
            done += len(block)
            md5.update(block)
            with self._translating(what):
                writer.write(bytes(block))  # copied, because obstore reads the bytes after `write` has returned
            if progress is not None:
                progress(len(block))

        content.write_to(take)
        check_length(content, done)
        check_deadline()
        if fence is not None:
            fence()
        with self._translating(what):
            writer.close()
        self._read_back(key, md5.digest(), done, deadline_s)

    def _read_back(self, key: str, md5: bytes, size_bytes: int, deadline_s: float | None) -> None:
        """Read the object back and compare its MD5, because obstore does not return the ETags of the parts.

        An object on AWS is not read, because AWS has compared the SHA-256 of each part.
        """
        if self.location.scheme is Scheme.S3 and self._options.endpoint is None:
            return
        found = hashlib.md5(usedforsecurity=False)
        self.stream(key, found.update, start=0, length=size_bytes, deadline_s=deadline_s)
        if found.digest() != md5:
            raise failures.changed_in_transit(f"PUT {self._name(key)}")

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

    def _upload_in_parts(
        self,
        uploads: S3Requests,
        key: str,
        source: Path | Content,
        size_bytes: int,
        fence: Callable[[], None] | None,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        before = self._stat_or_none(key, deadline_s)

        def has_arrived(etag: str) -> bool:
            found = self._stat_or_none(key, deadline_s)
            if found is None or found.size_bytes != size_bytes:
                return False
            version = found.version.strip('"')
            # If the server makes its ETags in another way than S3, any change of the ETag means that the upload is
            # complete.
            return version == etag or ("-" not in version and (before is None or found.version != before.version))

        upload_in_parts(
            uploads,
            self._full(key),
            source,
            size_bytes,
            has_arrived=has_arrived,
            fence=fence,
            progress=progress,
            deadline_s=deadline_s,
        )

    def _stat_or_none(self, key: str, deadline_s: float | None) -> StoredObject | None:
        try:
            return self.stat(key, deadline_s=deadline_s)
        except ObjectNotFoundError:
            return None

    def delete(self, key: str, *, deadline_s: float | None = None) -> None:
        """See `Store`."""
        check_key(key)
        with contextlib.suppress(ObjectNotFoundError):
            self._call("DELETE", key, lambda client: obstore.delete(client, key), deadline_s)

    def sweep(
        self,
        *,
        only: Callable[[str], bool] = lambda key: True,
        keys: Iterable[str] = (),
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """See `Store`. Only uploads to S3 with keys are deleted.

        Google and Azure delete unfinished uploads by themselves. Unfinished uploads to S3 with an instance's role
        stay until a lifecycle rule of the bucket deletes them.
        """
        uploads = self._requests
        if uploads is None:
            return 0
        prefix, num_swept = self._full(""), 0

        def find(start: str) -> list[UploadId]:
            return list(uploads.find(start, deadline_s=deadline_s))

        with ThreadPoolExecutor(_NUM_LISTINGS, thread_name_prefix="safepoint-sweep") as threads:
            found = threads.map(find, [prefix, *(self._full(key) for key in keys if only(key))])
            unique = {(upload.key, upload.upload_id): upload for page in found for upload in page}
        for upload in unique.values():
            is_old = begun_before_s is None or upload.begun_s < begun_before_s
            if is_old and only(upload.key.removeprefix(prefix)):
                with contextlib.suppress(ObjectNotFoundError):
                    uploads.abort(upload, deadline_s=deadline_s)
                    num_swept += 1
        return num_swept

    def _version(self, item: Any) -> str:
        return item[self._version_field] or ""

    def _object(self, key: str, item: Any) -> StoredObject:
        modified: datetime = item["last_modified"]
        return StoredObject(
            key=key, size_bytes=item["size"], version=self._version(item), modified_s=modified.timestamp()
        )

    def _full(self, key: str) -> str:
        return f"{self.location.path}/{key}" if self.location.path else key

    def _name(self, key: str) -> str:
        return f"{self.location.scheme}://{self.location.bucket}/{self._full(key)}"

    def _call(
        self,
        verb: str,
        key: str,
        request: Callable[[Client], _T],
        deadline_s: float | None,
        *,
        size_bytes: int = 0,
    ) -> _T:
        what = f"{verb} {self._name(key)}"

        def attempt(timeout_s: float) -> _T:
            return self._keys.use(partial(with_keys, timeout_s)) if self._keys else with_keys(timeout_s, None)

        def with_keys(timeout_s: float, keys: Keys | None) -> _T:
            with self._translating(what):
                return request(self._client(timeout_s, keys))

        # A slow link is not an error: a request may take as long as its bytes need at the slowest accepted rate.
        try_s = self._options.request_timeout_s + size_bytes / SLOWEST_BYTES_PER_S
        if deadline_s is None:
            deadline_s = clock.monotonic_s() + DEFAULT_WITHIN_S + try_s
        return retry(attempt, deadline_s=deadline_s, try_s=try_s)

    @contextlib.contextmanager
    def _translating(self, what: str) -> Generator[None]:
        try:
            yield
        except StorageError:
            raise
        # obstore's errors derive from several builtins, so all exceptions are translated.
        except Exception as error:
            translated = failures.from_obstore(error, what)
            is_s3_without_keys = self.location.scheme is Scheme.S3 and self._requests is None
            if isinstance(translated, AccessDeniedError) and is_s3_without_keys:
                translated = failures.without_keys(translated)
            raise translated from error

    def _client(self, timeout_s: float, keys: Keys | None) -> Client:
        # A client has one timeout for all its requests. Timeouts are rounded down to a doubling series, so that few
        # clients are needed.
        rounded_s = self._options.request_timeout_s
        while rounded_s > max(timeout_s, _SHORTEST_TRY_S):
            rounded_s /= 2
        while rounded_s * 2 <= timeout_s:
            rounded_s *= 2
        with self._lock:
            if keys != self._keys_of_clients:
                self._clients.clear()
                self._keys_of_clients = keys
            if rounded_s not in self._clients:
                self._clients[rounded_s] = make_client(self.location, self._options, rounded_s, keys)
            return self._clients[rounded_s]


def _gathered(content: Content) -> bytes:
    """The bytes of a small stream."""
    data = bytearray()

    def take(block: memoryview) -> None:
        data.extend(block)
        if len(data) > content.size_bytes:  # too long: raise now, before it fills the memory
            check_length(content, len(data))

    content.write_to(take)
    check_length(content, len(data))
    return bytes(data)
