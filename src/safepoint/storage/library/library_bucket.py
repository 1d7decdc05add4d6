"""Buckets of Google Cloud Storage and Azure. Requests go through obstore, an optional package.

This module repeats failed requests itself, because obstore's ten retries would hide faults and ignore the deadline.
There are two exceptions: `put` sends its request once, and obstore repeats the requests of `upload`. If an upload
fails or the process restarts, the next attempt sends the whole object again.

The server may be hostile. Objects are read as streams, and a read stops as soon as the requested bytes have arrived.
A listing has the same limits as a listing of S3. Two things that obstore keeps in memory are not limited in size: one
page of a listing, and the text of an error. Each of them has to arrive within the time limit of one request.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
import obstore.exceptions as obstore_errors
from obstore.store import AzureStore, GCSStore

from safepoint.errors import ObjectNotFoundError, StorageError, TransientError, UsageError, printable
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import named_proxy
from safepoint.storage import failures
from safepoint.storage.library.key_files import KeyFiles
from safepoint.storage.library.listing import Listing, run_in_thread
from safepoint.storage.location import Location, Scheme
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3.answers import SLOWEST_BYTES_PER_S, identifier
from safepoint.storage.s3.multipart import STREAM_MEMORY_BYTES, part_bytes_of
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S, retry
from safepoint.storage.store import Condition, Content, OpenFile, Progress, Sink, StoredObject, check_length, too_long

Client = Any  # obstore has no public type for all its stores
_SAS = {"AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"}
_ACCOUNTS = {"AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_ACCOUNT_NAME"}
_ACCOUNT = re.compile("[a-z0-9]{3,24}")
_NO_PROXY = "http://127.255.255.1:1"
_SHORTEST_TRY_S = 0.25
_NUM_STREAM_TRIES = 10
_BLOCK_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_CHUNK = 100
"""How many names obstore returns at once. It requests pages until it has this many names."""
_STATUS = re.compile(r"status code: (\d{3})|\bstatus: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_T = TypeVar("_T")


def make_client(
    location: Location, options: StorageOptions, timeout_s: float, keys: KeyFiles, *, is_repeating: bool = False
) -> Client:
    """obstore's client for the requests to a bucket.

    Args:
        location: `gs` or `az`.
        options: the certificates to trust, and the longest wait for bytes.
        timeout_s: the time limit of each request, in seconds.
        keys: the files with keys.
        is_repeating: whether obstore repeats failed requests itself.
    """
    client_options: dict[str, Any] = {
        "allow_http": True,
        "timeout": timedelta(seconds=timeout_s),
        # `timeout` limits a whole request. `read_timeout` limits each wait for bytes, so a request to a silent server
        # ends sooner.
        "read_timeout": timedelta(seconds=min(timeout_s, options.request_timeout_s)),
        "connect_timeout": timedelta(seconds=min(timeout_s, 10.0)),
        "allow_invalid_certificates": not options.verify_tls,
    }
    if authorities := options.authorities():
        client_options["root_certificate"] = authorities
    client_options |= _only_to_the_store(location)
    repeats: Any = {
        "max_retries": _NUM_STREAM_TRIES if is_repeating else 0,
        "retry_timeout": timedelta(seconds=DEFAULT_WITHIN_S),
    }
    kind: Any = GCSStore if location.scheme is Scheme.GS else AzureStore
    return kind(location.bucket, client_options=client_options, retry_config=repeats, **keys.options)


def _check_account(location: Location) -> None:
    """Raise UsageError if the account's name could lead to another host: obstore puts the name into the address."""
    for name, value in os.environ.items():
        if location.scheme is Scheme.AZ and name.upper() in _ACCOUNTS and not _ACCOUNT.fullmatch(value):
            raise UsageError(
                f"{name} is {value[:80]!r}, which is not the name of a storage account; {location} was not opened",
                hint="a storage account has 3 to 24 lower-case letters and digits",
            )


def _only_to_the_store(location: Location) -> dict[str, Any]:
    """Options that keep a SAS token of Azure from other hosts.

    The token is a part of the address, and obstore sends the address as `Referer` to the target of a redirect. So
    requests to other hosts go to a proxy that does not exist, and fail. If the environment names a real proxy,
    obstore uses that proxy and follows redirects. Then another host may receive the token.
    """
    named = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith("AZURE_")}
    if location.scheme is not Scheme.AZ or not _SAS & named.keys() or named_proxy("https://core.windows.net"):
        return {}
    hosts = [urlsplit(value).hostname for value in named.values() if "://" in value]
    return {"proxy_url": _NO_PROXY, "proxy_excludes": ",".join(["core.windows.net", *filter(None, hosts)])}


class LibraryBucket:
    """A bucket that obstore reaches; see `Bucket`.

    Args:
        location: `gs` or `az`.
        options: the certificates to trust, and the time limit of a request.

    Raises:
        UsageError: a variable that names the storage account is invalid.
        AccessDeniedError: see `KeyFiles`.
    """

    def __init__(self, location: Location, options: StorageOptions) -> None:
        _check_account(location)
        self._location = location
        self._options = options
        self._keys = KeyFiles(location)
        self._clients: dict[float, Client] = {}
        self._lock = threading.Lock()
        # The name of the value that a conditional write compares. Google's stores require the object's generation.
        self._version_field = "version" if location.scheme is Scheme.GS else "e_tag"

    def objects(self, prefix: str, *, deadline_s: float | None) -> Iterator[StoredObject]:
        """See `Bucket`."""

        def everything(client: Client) -> list[StoredObject]:
            pages: Any = obstore.list(client, prefix.rstrip("/") or None, chunk_size=_CHUNK)  # pyright: ignore[reportUnknownMemberType]
            listing = Listing(f"LIST {self._name(prefix)}", self._object, until_s=deadline_s)
            return run_in_thread(lambda: listing.read(pages))

        # One attempt reads all pages. If a later page fails, the whole listing is repeated, so that an incomplete
        # listing is never returned.
        listed = self._call("LIST", prefix, everything, deadline_s)
        while listed:  # the caller may keep other copies of the names, so these are released one by one
            found = listed.pop()
            if found.key.startswith(prefix):  # a hostile server may list other names
                yield found

    def head(self, key: str, *, deadline_s: float | None) -> StoredObject:
        """See `Bucket`."""
        return self._object(key, self._call("HEAD", key, lambda client: obstore.head(client, key), deadline_s))

    def get(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None) -> None:
        """See `Bucket`."""
        for begin in range(start, start + length, _BLOCK_BYTES):
            sink(self._range(key, begin, min(_BLOCK_BYTES, start + length - begin), deadline_s))

    def _range(self, key: str, start: int, length: int, deadline_s: float | None) -> memoryview:
        def get(client: Client) -> memoryview:
            data = bytearray()
            self._read(client, key, {"range": (start, start + length)}, data, length)
            if len(data) >= length:
                return memoryview(data)[:length]
            size_bytes = obstore.head(client, key)["size"]
            if size_bytes < start + length:
                raise StorageError(f"{self._name(key)} has {size_bytes} bytes, not {start + length}")
            raise TransientError(f"the answer for {self._name(key)} was cut off")

        return self._call("GET", key, get, deadline_s, size_bytes=length)

    def get_rest(self, key: str, *, start: int, most_bytes: int, deadline_s: float | None) -> bytearray:
        """See `Bucket`."""

        def get(client: Client) -> bytearray:
            data = bytearray()
            self._read(client, key, {"range": {"offset": start}} if start else None, data, most_bytes + 1)
            if len(data) > most_bytes:
                raise too_long(f"GET {self._name(key)}", most_bytes)
            return data

        return self._call("GET", key, get, deadline_s)

    def _read(self, client: Client, key: str, options: Any, data: bytearray, most_bytes: int) -> None:
        """Append blocks of an object, or of a range, to `data`. Stop when `data` has at least `most_bytes` bytes."""
        stream: Any = obstore.get(client, key, options=options).stream(min_chunk_size=_READ_BYTES)
        for block in stream:
            data += memoryview(block)
            if len(data) >= most_bytes:
                return

    def put(self, key: str, data: bytes, condition: Condition | None, *, within_s: float) -> str:
        """See `Bucket`."""
        mode: Any = "overwrite"
        if condition is not None:
            mode = "create" if condition.version is None else {self._version_field: condition.version}
        with self._translating(f"PUT {self._name(key)}"):
            return self._version(obstore.put(self._client(within_s), key, data, mode=mode, use_multipart=False))

    def upload(
        self,
        key: str,
        source: OpenFile | Content,
        *,
        fence: Callable[[], None] | None,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        """See `Bucket`. obstore repeats the requests here, because this method can read the content only once."""
        # A file is converted to a stream. If obstore read the file itself, this method could not call `fence` after
        # the last part.
        content = source if isinstance(source, Content) else _content_of(source)
        what, done, md5 = f"PUT {self._name(key)}", 0, hashlib.md5(usedforsecurity=False)
        part_bytes = part_bytes_of(content.size_bytes, is_stream=True)
        self._keys.refresh()
        client = make_client(
            self._location, self._options, self._options.request_timeout_s, self._keys, is_repeating=True
        )

        def check_deadline() -> None:
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise TransientError(f"{what}: {done} of {content.size_bytes} bytes were sent before the deadline")

        # The writer is not used as a context manager, because its `__exit__` would complete the object even
        # after an error.
        writer = obstore.open_writer(
            client, key, buffer_size=part_bytes, max_concurrency=max(1, STREAM_MEMORY_BYTES // part_bytes - 1)
        )

        def take(block: memoryview) -> None:
            nonlocal done
            check_deadline()
            done += len(block)
            md5.update(block)
            with self._translating(what):
                # Copy the block, because obstore reads the bytes after `write` has returned.
                writer.write(bytes(block))
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
        """Read the object back and compare its MD5, because obstore does not return the ETags of the parts."""
        found = hashlib.md5(usedforsecurity=False)
        self.get(key, found.update, start=0, length=size_bytes, deadline_s=deadline_s)
        if found.digest() != md5:
            raise failures.changed_in_transit(f"PUT {self._name(key)}")

    def delete(self, key: str, *, deadline_s: float | None) -> None:
        """See `Bucket`."""
        self._call("DELETE", key, lambda client: obstore.delete(client, key), deadline_s)

    def sweep(
        self,
        prefix: str,
        *,
        only: Callable[[str], bool],
        keys: Iterable[str],
        begun_before_s: float | None,
        deadline_s: float | None,
    ) -> int:
        """Do nothing, because obstore cannot list unfinished uploads.

        Azure deletes them after a week. On Google Cloud Storage, they stay until a lifecycle rule of the
        bucket deletes them.
        """
        del prefix, only, keys, begun_before_s, deadline_s
        return 0

    def _version(self, item: Any) -> str:
        try:
            return identifier(item[self._version_field])
        except ValueError as error:
            where = f"{self._location.scheme}://{self._location.bucket}"
            raise StorageError(
                f"{where}: the answer has an invalid version of an object",
                hint="check that the endpoint is the store itself, and not a proxy or a web console",
            ) from error

    def _object(self, key: str, item: Any) -> StoredObject:
        modified: datetime = item["last_modified"]
        return StoredObject(
            key=key, size_bytes=item["size"], version=self._version(item), modified_s=modified.timestamp()
        )

    def _name(self, key: str) -> str:
        return f"{self._location.scheme}://{self._location.bucket}/{key}"

    def _call(
        self,
        verb: str,
        key: str,
        request: Callable[[Client], _T],
        deadline_s: float | None,
        *,
        size_bytes: int = 0,
    ) -> _T:
        def attempt(timeout_s: float) -> _T:
            with self._translating(f"{verb} {self._name(key)}"):
                return request(self._client(timeout_s))

        # A slow network is not an error. So the time limit includes the time that the bytes need at the slowest
        # accepted speed.
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
            raise from_obstore(error, what) from error

    def _client(self, timeout_s: float) -> Client:
        self._keys.refresh()
        # A client has one timeout for all its requests. Timeouts are rounded down, so that a few clients are enough.
        # A rounded timeout is `request_timeout_s` multiplied by a power of 2, such as 1/4, 1/2, 1, 2 or 4. A timeout
        # below 0.25 s counts as 0.25 s.
        rounded_s = self._options.request_timeout_s
        while rounded_s > max(timeout_s, _SHORTEST_TRY_S):
            rounded_s /= 2
        while rounded_s * 2 <= timeout_s:
            rounded_s *= 2
        with self._lock:
            if rounded_s not in self._clients:
                self._clients[rounded_s] = make_client(self._location, self._options, rounded_s, self._keys)
            return self._clients[rounded_s]


def _content_of(file: OpenFile) -> Content:
    def write_to(sink: Sink) -> None:
        done, end = 0, file.size_bytes + 1  # read one byte more than the size, to find out whether the file has grown
        while block := os.pread(file.descriptor, min(_READ_BYTES, end - done), done):
            done += len(block)
            sink(memoryview(block))

    return Content(size_bytes=file.size_bytes, write_to=write_to)


def from_obstore(error: Exception, what: str) -> StorageError:
    """The error for an exception that obstore has raised."""
    text = str(error)
    match = _STATUS.search(text)
    if match is not None:
        code = _CODE.search(text)
        return failures.from_status(int(match[1] or match[2]), code[1] if code else "", what)
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{what}: there is no such object")
    if isinstance(error, obstore_errors.AlreadyExistsError | obstore_errors.PreconditionError):
        return failures.from_status(412, "", what)
    if isinstance(error, obstore_errors.UnauthenticatedError | obstore_errors.PermissionDeniedError):
        return failures.from_status(403, "", what)
    if isinstance(error, obstore_errors.InvalidPathError | obstore_errors.NotSupportedError):
        # obstore cannot list an object whose name is not a valid path. Safepoint writes no such names, so another
        # program wrote the object.
        is_name = isinstance(error, obstore_errors.InvalidPathError)
        hint = "delete that object, or name another location" if is_name else None
        return StorageError(f"{what}: the store does not support this: {printable(text.splitlines()[0])}", hint=hint)
    return failures.from_connection(text, what)
