"""A server, or a person who may create objects, chooses names that take much more memory than their bytes.

One operation has one limit for all its listings, however many listings it needs.
"""

import asyncio
import itertools
import json
import logging
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from safepoint.checkpoint.remote import marks
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, RemoteFolder
from safepoint.errors import StorageError, TransientError
from safepoint.storage.s3 import requests
from safepoint.storage.store import StoredObject
from tests.support.hostile_s3 import Request, hostile_store, item, page

_NO_S3 = "the answer is not a valid answer of an S3 server"


def _uploads(*found: tuple[str, str]) -> bytes:
    each = "".join(f"<Upload><Key>{key}</Key><UploadId>{name}</UploadId></Upload>" for key, name in found)
    more = "<IsTruncated>false</IsTruncated>"
    return f"<ListMultipartUploadsResult>{more}{each}</ListMultipartUploadsResult>".encode()


def _prefix(request: Request) -> str | None:
    """The prefix whose uploads the request lists; None for another request."""
    query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
    return query["prefix"][0] if request.command == "GET" and "uploads" in query else None


def test_wide_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One character above U+FFFF makes Python keep all 700 characters of a name in four bytes each."""
    monkeypatch.setattr(requests, "MOST_LISTED_BYTES", 4 << 20)
    count = itertools.count()

    def answer(request: Request) -> bool:
        number = next(count)
        names = (f"run/{quote('😀')}{'k' * 700}{number}-{index}" for index in range(1000))
        return request.send(200, page(*(item(name, 1) for name in names), token=str(number)))

    with hostile_store(answer) as (store, server):
        with pytest.raises(StorageError, match="too many names"):
            list(store.list())
        assert server.num_requests == 2


def test_one_copy_of_each_name() -> None:
    """While a caller takes the objects of a listing one by one, each name is in memory once."""
    num_names, length = 2000, 900
    names = [f"run/{'k' * length}{index:06d}" for index in range(num_names)]
    with hostile_store(lambda request: request.send(200, page(*(item(name, 1) for name in names)))) as (store, _):
        tracemalloc.start()
        try:
            listed = store.list()
            next(listed)
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert sum(1 for _ in listed) == num_names - 1
    assert num_bytes < 1.7 * num_names * length


@pytest.mark.parametrize("name", ["k" * 1021, "😀" * 256, "é" * 511])
def test_names_that_are_too_long(name: str) -> None:
    """S3 has no key of more than 1024 bytes."""
    with hostile_store(lambda request: request.send(200, page(item(f"run/{quote(name)}", 1)))) as (store, _):
        with pytest.raises(StorageError, match=_NO_S3):
            list(store.list())


@pytest.mark.parametrize("name", ["k" * 1020, "😀" * 255, "é" * 510])
def test_the_longest_names(name: str) -> None:
    with hostile_store(lambda request: request.send(200, page(item(f"run/{quote(name)}", 1)))) as (store, _):
        assert [found.key for found in store.list()] == [name]


@pytest.mark.parametrize("version", ["😀" + "e" * 100, "e" * 1100, "a\tb", "é"])
def test_versions_in_listings(version: str) -> None:
    """A version is short, and has only printable ASCII characters."""
    one = item("run/a", 1).replace("<Size>", f"<ETag>{version}</ETag><Size>")
    with hostile_store(lambda request: request.send(200, page(one))) as (store, _):
        with pytest.raises(StorageError, match=_NO_S3):
            list(store.list())


@pytest.mark.parametrize("version", ["a\x01b", "a\r\n b", "é", "e" * 1100])
@pytest.mark.parametrize("method", ["HEAD", "PUT"])
def test_versions_in_headers(method: str, version: str) -> None:
    """A header continues on the next line if that line begins with a blank."""
    headers = {"ETag": version, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}

    def answer(request: Request) -> bool:
        return request.command == method and request.send(200, b"", headers)

    with hostile_store(answer, {"run/a": b"abc"}) as (store, _):
        with pytest.raises(StorageError, match=_NO_S3):
            _ = store.stat("a") if method == "HEAD" else store.write("a", b"abc")


def test_one_limit_for_all_listings_of_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark names 200 large files, and the server lists 125 uploads of each."""
    monkeypatch.setattr(requests, "MOST_LISTED_BYTES", 1 << 20)
    count = itertools.count()

    def answer(request: Request) -> bool:
        prefix = _prefix(request)
        if prefix == "run/":
            return request.send(200, _uploads())
        found = ((prefix or "", f"{next(count)}{'u' * 100}") for _ in range(125))
        return request.send(200, _uploads(*found)) if prefix else request.send(204)

    with hostile_store(answer) as (store, server):
        with pytest.raises(StorageError, match="too many names"):
            store.sweep(keys=[f"checkpoint-1/{number}" for number in range(200)])
        assert server.num_requests < 60


@pytest.mark.parametrize("slow", ["listings", "deletions"])
def test_one_time_limit_for_a_sweep(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes little time, and there are many."""
    monkeypatch.setattr(requests, "_LIST_WITHIN_S", 0.5)

    def answer(request: Request) -> bool:
        prefix = _prefix(request)
        if (prefix is not None) == (slow == "listings"):
            time.sleep(0.05)
        many = [(f"run/{number}", "u") for number in range(100)] if prefix == "run/" else []
        return request.send(200, _uploads(*many)) if prefix is not None else request.send(204)

    with hostile_store(answer) as (store, server):
        with pytest.raises(TransientError, match="took more than"):
            store.sweep(keys=[f"checkpoint-1/{number}" for number in range(1000 if slow == "listings" else 0)])
        assert server.num_requests < 200


def test_uploads_without_an_identifier() -> None:
    """A request to abort an upload without its identifier would delete the object itself."""
    methods: list[str] = []

    def answer(request: Request) -> bool:
        methods.append(request.command)
        return request.send(204) if _prefix(request) is None else request.send(200, _uploads(("run/a", "")))

    with hostile_store(answer) as (store, _):
        with pytest.raises(StorageError, match=_NO_S3):
            store.sweep()
    assert set(methods) == {"GET"}


def test_a_page_that_does_not_state_whether_it_is_the_last_one() -> None:
    """A run would begin at step 0 beside its checkpoints."""
    body = b"<ListBucketResult><MaxKeys>1000</MaxKeys></ListBucketResult>"
    with hostile_store(lambda request: request.is_listing and request.send(200, body)) as (store, _):
        with pytest.raises(StorageError, match=_NO_S3):
            RemoteFolder(store).steps()


def _marks(num: int) -> dict[str, bytes]:
    files = json.dumps({"files": {f"{number:04d}": 1 << 25 for number in range(100)}}).encode()
    return {f"run/{UNFINISHED}/checkpoint-{step}": files for step in range(1, num + 1)}


def test_marks_whose_files_fill_the_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A sweep keeps the files of the marks until it ends. Beyond the limit, uploads of their files stay."""
    monkeypatch.setattr(marks, "_MOST_LISTED_BYTES", 100_000)
    prefixes: list[str] = []

    def answer(request: Request) -> bool:
        prefix = _prefix(request)
        prefixes.extend([prefix] if prefix else [])
        return prefix is not None and request.send(200, _uploads())

    with hostile_store(answer, _marks(20)) as (store, _):
        RemoteFolder(store).sweep()
    assert prefixes.pop(0) == "run/"
    assert 100 <= len(prefixes) < 600
    assert "list too many files" in caplog.text


@pytest.mark.parametrize("act", ["sweep", "clean"])
def test_marks_without_number(act: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After half an hour, the other marks are left to the next start."""
    monkeypatch.setattr(marks, "_WITHIN_S", -1.0)
    caplog.set_level(logging.WARNING)

    def answer(request: Request) -> bool:
        assert request.command == "GET"
        return _prefix(request) is not None and request.send(200, _uploads())

    with hostile_store(answer, _marks(20)) as (store, _):
        remote = RemoteFolder(store)
        assert (remote.sweep() if act == "sweep" else remote.clean(keep=[])) == 0
    assert "too many marks" in caplog.text


def test_wide_names_in_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit holds for the names that obstore lists."""
    listing = pytest.importorskip("safepoint.storage.library.listing")
    monkeypatch.setattr(listing, "MOST_LISTED_BYTES", 4 << 20)
    num_chunks = 0

    async def chunks() -> AsyncIterator[list[dict[str, Any]]]:
        nonlocal num_chunks
        for number in range(100):
            num_chunks += 1
            yield [{"path": f"run/😀{'k' * 700}{number}-{index}"} for index in range(1000)]

    def make(name: str, _: Any) -> StoredObject:
        return StoredObject(key=name, size_bytes=1, version="v", modified_s=0.0)

    with pytest.raises(StorageError, match="too many names"):
        asyncio.run(listing.Listing("LIST", make, until_s=None).read(chunks()))
    assert num_chunks == 2
