"""A server sends more than was asked for, states another size than before, or lists names without end.

Every read has a limit that does not come from the server: for S3, and for the library that reads Google and Azure.
"""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.remote import code as code_module
from safepoint.checkpoint.remote.code import read_code
from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme, parse_location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import MOST_READ_BYTES, Store
from tests.attacks.test_hostile_servers import peak_bytes
from tests.support.hostile_s3 import Answer, Request, hostile_store, item, page

_HUGE = 50 << 30
_BLOCK = bytes(1 << 20)
_SENT_AT_MOST = 1 << 30
"""So that a test without a limit fails, and does not fill the machine."""


def head(request: Request, status: int, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in {"ETag": '"a"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers}.items():
        request.send_header(name, value)
    request.end_headers()


def pour(request: Request) -> bool:
    """A body without an end."""
    for _ in range(_SENT_AT_MOST >> 20):
        request.wfile.write(_BLOCK)
    return True


def whole_object(request: Request) -> bool:
    head(request, 200, {"Content-Length": str(_HUGE)})
    return pour(request)


def whole_object_in_chunks(request: Request) -> bool:
    head(request, 200, {"Transfer-Encoding": "chunked"})
    for _ in range(_SENT_AT_MOST >> 20):
        request.wfile.write(b"100000\r\n" + _BLOCK + b"\r\n")
    return True


def one_range(request: Request) -> bool:
    head(request, 206, {"Content-Length": str(_HUGE), "Content-Range": "bytes 0-99/100"})
    return pour(request)


@contextlib.contextmanager
def azure(answer: Answer, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float = 20.0) -> Iterator[tuple[Store, Any]]:
    """A store at `az://bucket/run`, whose requests go through obstore."""
    pytest.importorskip("obstore")
    with hostile_store(answer) as (_, server):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        location = Location(scheme=Scheme.AZ, bucket="bucket", path="run")
        yield ObjectStore(location, StorageOptions(request_timeout_s=timeout_s)), server


@pytest.fixture(params=["s3", "az"])
def serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], Any]:
    if request.param == "s3":
        return hostile_store
    return lambda answer: azure(answer, monkeypatch)


@pytest.mark.parametrize("answer", [whole_object, whole_object_in_chunks])
@pytest.mark.parametrize("limit", [{}, {"most_bytes": 1000}])
def test_a_whole_object(limit: dict[str, int], answer: Answer, serve: Callable[[Answer], Any]) -> None:
    """It is read up to the caller's limit, or up to that of all reads, and refused."""
    before = peak_bytes()
    with serve(answer) as (store, _):
        with pytest.raises(StorageError) as raised:
            store.read("a", deadline_s=clock.monotonic_s() + 10, **limit)
    if answer is whole_object or store.location.scheme is Scheme.S3:  # obstore refuses an answer without a length
        assert f"more than {limit.get('most_bytes', MOST_READ_BYTES):,} bytes" in str(raised.value)
    assert peak_bytes() - before < 300 << 20


def test_a_range(serve: Callable[[Answer], Any]) -> None:
    """No more is kept than was asked for."""
    before = peak_bytes()
    with serve(one_range) as (store, _):
        assert len(store.read("a", length=100)) == 100
    assert peak_bytes() - before < 100 << 20


def test_an_object_of_the_size_of_the_limit(serve: Callable[[Answer], Any], tmp_path: Path) -> None:
    """It is read."""

    def answer(request: Request) -> bool:
        head(request, 200, {"Content-Length": "1000"})
        request.wfile.write(b"x" * 1000)
        return True

    local = LocalStore(Location.of_folder(tmp_path))
    local.write("a", b"x" * 1000)
    with serve(answer) as (store, _):
        for one in (store, local):
            assert bytes(one.read("a", most_bytes=1000)) == b"x" * 1000
            with pytest.raises(StorageError, match="more than 999 bytes"):
                one.read("a", most_bytes=999)


def test_the_code_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is requested first, and is another one when it is read."""

    def answer(request: Request) -> bool:
        if request.command == "HEAD":
            return request.send(200, b"x" * 10, {"ETag": '"a"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})
        return whole_object(request)

    before = peak_bytes()
    with hostile_store(answer) as (store, _):
        monkeypatch.setattr(code_module, "open_store", lambda location: store)
        with pytest.raises(StorageError, match="more than 10 bytes"):
            read_code("s3://bucket/run/code.zip", hashlib.sha256(b"x" * 10).hexdigest())
    assert peak_bytes() - before < 100 << 20
    assert parse_location("s3://bucket/run/code.zip").name == "code.zip"


# ---- listings of the library ---------------------------------------------------------------------------------------

_BLOB = (
    "<Blob><Name>{}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
    "<Content-Length>5</Content-Length><Etag>0x1</Etag><Content-Type>a/b</Content-Type></Properties></Blob>"
)


def blobs(*names: str, marker: str = "") -> bytes:
    """A page of Azure's listing; with a marker, another one follows."""
    found = "".join(map(_BLOB.format, names))
    text = f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
    return f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()


def test_an_honest_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several pages, one of them empty; names outside of the location are ignored."""
    pages = [
        blobs(*(f"run/{index:04d}" for index in range(250)), marker="1"),
        blobs(marker="2"),
        blobs("run/a", "other/b", "run/b"),
    ]

    def answer(request: Request) -> bool:
        marker = next((number for number in (1, 2) if f"marker={number}" in request.path), 0)
        return request.send(200, pages[marker])

    with azure(answer, monkeypatch) as (store, _):
        assert [one.key for one in store.list()] == [*(f"{index:04d}" for index in range(250)), "a", "b"]


@pytest.mark.parametrize("num_names", [1, 3, 250])
def test_the_same_page_again_and_again(num_names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing ends as soon as a server repeats itself."""
    names = [f"run/{index}" for index in range(num_names)]
    with azure(lambda request: request.send(200, blobs(*names, marker="again")), monkeypatch) as (store, server):
        with pytest.raises(StorageError, match="again and again"):
            list(store.list())
        assert server.num_requests < 300


@pytest.mark.parametrize(("limit", "value"), [("MOST_LISTED", 5000), ("MOST_LISTED_BYTES", 1 << 22)])
def test_names_without_end(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page has new names."""
    listing = pytest.importorskip("safepoint.storage.library.listing")
    monkeypatch.setattr(listing, limit, value)
    count = itertools.count()

    def answer(request: Request) -> bool:
        number = next(count)
        names = (f"run/{number}/{index}{'x' * 200}" for index in range(1000))
        return request.send(200, blobs(*names, marker=str(number)))

    with azure(answer, monkeypatch) as (store, server):
        with pytest.raises(StorageError, match="too many names"):
            list(store.list())
        assert server.num_requests < 20


@pytest.mark.parametrize("limit", ["_LIST_WITHIN_S", "_CHUNK_WITHIN_S", "deadline"])
def test_empty_pages_without_end(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore requests one after the other, and returns nothing; in the end its requests stop."""
    listing = pytest.importorskip("safepoint.storage.library.listing")
    if limit != "deadline":
        monkeypatch.setattr(listing, limit, 0.5)
    count = itertools.count()
    with azure(lambda request: request.send(200, blobs(marker=str(next(count)))), monkeypatch) as (store, server):
        begun_s = clock.monotonic_s()
        with pytest.raises(TransientError, match="too long"):
            list(store.list(deadline_s=begun_s + 2))
        assert clock.monotonic_s() - begun_s < 60
        num_before = [0, server.num_requests + 1]
        until_s = clock.monotonic_s() + 30
        # The last requests may still be on their way: wait until a second passes without one.
        while num_before[-1] != num_before[-2] and clock.monotonic_s() < until_s:
            time.sleep(1)
            num_before.append(server.num_requests)
        assert num_before[-1] == num_before[-2]


def test_a_listing_inside_of_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook calls from a thread that runs one."""
    import asyncio

    async def call(store: Store) -> list[str]:
        return [one.key for one in store.list()]

    with azure(lambda request: request.send(200, blobs("run/a")), monkeypatch) as (store, _):
        assert asyncio.run(call(store)) == ["a"]


def test_a_listing_of_s3_has_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the library are those of S3."""
    from safepoint.storage.s3 import requests

    monkeypatch.setattr(requests, "MOST_LISTED", 10)
    names = [item(f"run/{index}", 1) for index in range(20)]
    with hostile_store(lambda request: request.send(200, page(*names))) as (store, _):
        with pytest.raises(StorageError, match="too many names"):
            list(store.list())
