"""The server of the object store answers what it likes: each request ends, in bounded memory, with a StorageError."""

import contextlib
import itertools
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.s3 import requests, retry
from safepoint.storage.store import Condition
from tests.support.checkpoints import commit, prepared
from tests.support.hostile_s3 import Request, hostile_store, item, objects_of, page

_VALUES = {
    "a size that is no number": item("run/a", "abc"),
    "a negative size": item("run/a", "-5"),
    "a size of 5000 digits": item("run/a", "9" * 5000),
    "a size that no float can have": item("run/checkpoint-10/a", "9" * 400),
    "no size": "<Contents><Key>run/a</Key></Contents>",
    "no time": item("run/a", 1, "yesterday"),
    "a time that does not exist": item("run/a", 1, "99999-01-01T00:00:00Z"),
}


@pytest.mark.parametrize("name", _VALUES)
def test_invalid_values(name: str) -> None:
    """A value that S3 does not have is an error of the store, and no traceback or wrong argument."""
    with hostile_store(lambda request: request.is_listing and request.send(200, page(_VALUES[name]))) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            Inventory(store).items()


_GOOD = {"Content-Length": "3", "ETag": '"a"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("Content-Length", text) for text in (None, "abc", "-5", "9" * 5000, "9" * 30)),
        *(("ETag", text) for text in (None, "")),
        *(("Last-Modified", text) for text in (None, "yesterday", "Thu, 99 Jan 2026 00:00:00 GMT", "9" * 5000)),
    ],
)
def test_invalid_headers(name: str, text: str | None) -> None:
    """The size, version or time of an object is missing or none."""
    headers = {key: value for key, value in {**_GOOD, name: text}.items() if value is not None}

    def answer(request: Request) -> bool:
        request.send_response(200)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        return True

    objects = {"run/a": b"abc"}
    with hostile_store(lambda request: request.command == "HEAD" and answer(request), objects) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            store.stat("a")


def test_a_version_that_no_header_can_have() -> None:
    """A version that a listing has named is sent back to the server as a condition."""
    with hostile_store() as (store, server):
        for version in ('"\u20ac"', '"a"\r\nx-amz-acl: public-read'):
            with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
                store.write("a", b"content", condition=Condition(version=version))
        assert server.num_requests == 0


@pytest.mark.parametrize("headers", [{"Content-Length": "1000"}, {"Transfer-Encoding": "chunked"}, {"X-None": ""}])
def test_a_whole_object_that_is_cut_off(headers: dict[str, str]) -> None:
    """An answer that ends early, or has no visible end, is not taken for the object."""

    def answer(request: Request) -> bool:
        request.send_response(200)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        request.wfile.write(b"10\r\nabc")
        request.close_connection = True
        return True

    with hostile_store(answer) as (store, _):
        with pytest.raises(StorageError):
            store.read("a", deadline_s=clock.monotonic_s() + 1)


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_an_answer_to_a_change_that_is_cut_off(method: str) -> None:
    """A server may fail after it has sent the status 200, and then describes the error in the body."""

    def answer(request: Request) -> bool:
        if request.command != method:
            return False
        request.send_response(200)
        request.send_header("Content-Length", "100")
        request.end_headers()
        request.wfile.write(b"<Er")
        request.close_connection = True
        return True

    with hostile_store(answer, {"run/a": b"abc"}) as (store, _):
        with pytest.raises(TransientError, match="was cut off"):
            _CALLS[method](store, clock.monotonic_s() + 1)


@pytest.mark.parametrize(
    "body", [b'<?xml version="1.0" encoding="UTF-7"?><a/>', b'<?xml version="1.0" encoding="x"?><a/>']
)
def test_unknown_encodings(body: bytes) -> None:
    with hostile_store(lambda request: request.send(200, body)) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            list(store.list())


@pytest.mark.parametrize("tokens", [[""], ["a"], ["a", "b", "c"]])
def test_pages_that_come_again(tokens: list[str]) -> None:
    """A listing that leads back to an earlier page ends."""
    turns = itertools.cycle(tokens)
    with hostile_store(lambda request: request.send(200, page(token=next(turns)))) as (store, server):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            list(store.list())
        assert server.num_requests <= len(tokens) + 1


def test_pages_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page has new names, which would fill the memory."""
    monkeypatch.setattr(requests, "MOST_LISTED", 1000)
    count = itertools.count()

    def answer(request: Request) -> bool:
        number = next(count)
        return request.send(200, page(*(item(f"run/{number}-{index}", 1) for index in range(300)), token=str(number)))

    with hostile_store(answer) as (store, server):
        with pytest.raises(StorageError, match="more than 1000 names"):
            list(store.list())
        assert server.num_requests == 4


def test_empty_pages_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is empty, so that nothing but the time grows."""
    monkeypatch.setattr(requests, "_LIST_WITHIN_S", 0.5)
    count = itertools.count()
    with hostile_store(lambda request: request.send(200, page(token=str(next(count))))) as (store, _):
        with pytest.raises(TransientError, match="took more than"):
            list(store.list())


def _drip_body(request: Request) -> bool:
    request.send_response(200)
    request.send_header("Content-Length", "1000000")
    request.end_headers()
    return _drip(request, b" ")


def _drip_header(request: Request) -> bool:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    return _drip(request, b"a")


def _continue(request: Request) -> bool:
    return _drip(request, b"HTTP/1.1 100 Continue\r\n\r\n")


def _drip(request: Request, data: bytes) -> bool:
    for _ in range(600):
        request.wfile.write(data)
        request.wfile.flush()
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("answer", [_drip_body, _drip_header, _continue])
def test_an_answer_byte_by_byte(answer: object) -> None:
    """Every byte comes in time, and the answer never ends."""
    with hostile_store(answer, timeout_s=1.0) as (store, _):  # pyright: ignore[reportArgumentType]
        begun_s = clock.monotonic_s()
        with pytest.raises(TransientError):
            list(store.list(deadline_s=begun_s + 3))
        assert clock.monotonic_s() - begun_s < 10


@pytest.mark.parametrize("size", [b"-1", b"-5"])
@pytest.mark.parametrize("act", ["list", "read", "read all"])
def test_a_chunk_of_a_negative_size(act: str, size: bytes) -> None:
    """Python reads such a chunk up to the end of the connection, which may not come."""
    num_sent = 0

    def answer(request: Request) -> bool:
        nonlocal num_sent
        if request.command != "GET":
            return False
        request.send_response(206 if act == "read" else 200)
        request.send_header("Transfer-Encoding", "chunked")
        request.send_header("Content-Range", "bytes 0-99/100")
        request.end_headers()
        request.wfile.write(size + b"\r\n")
        request.close_connection = True
        for _ in range(200):
            request.wfile.write(b"x" * (1 << 20))
            num_sent += 1
        return True

    with hostile_store(answer, {"run/a": b"x" * 100}) as (store, _):
        until_s = clock.monotonic_s() + 1
        with contextlib.suppress(TransientError):
            if act == "list":
                list(store.list(deadline_s=until_s))
            else:
                store.read("a", length=100 if act == "read" else None, deadline_s=until_s)
    assert num_sent < 100


def test_data_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress does not reset the time limit for ever."""
    monkeypatch.setattr(requests, "DEFAULT_WITHIN_S", 2.0)
    monkeypatch.setattr(retry, "DEFAULT_WITHIN_S", 2.0)

    def answer(request: Request) -> bool:
        first = int(request.headers["range"].partition("=")[2].partition("-")[0])
        request.send_response(206)
        request.send_header("Content-Length", str(1000 - first))
        request.send_header("Content-Range", f"bytes {first}-999/1000")
        request.end_headers()
        return _drip(request, b"x")

    with hostile_store(answer, timeout_s=0.5) as (store, _):
        begun_s = clock.monotonic_s()
        with pytest.raises(TransientError):
            store.stream("a", lambda block: None, start=0, length=1000)
        assert clock.monotonic_s() - begun_s < 10


def test_a_range_of_5000_digits() -> None:
    digits = "9" * 5000
    headers = {"Content-Range": f"bytes 0-99/{digits}"}
    with hostile_store(lambda request: request.send(206, b"x" * 100, headers)) as (store, _):
        with pytest.raises(StorageError, match="another range"):
            store.stream("a", lambda block: None, start=0, length=100)


def test_a_code_of_ten_megabytes() -> None:
    """The server's own word for an error does not fill the terminal."""
    body = b"<Error><Code>" + b"A" * 10_000_000 + b"</Code></Error>"
    with hostile_store(lambda request: request.send(400, body)) as (store, _):
        with pytest.raises(StorageError) as raised:
            list(store.list())
    assert len(str(raised.value)) < 1000


_M = 16 << 20
_LARGE = {
    "empty elements": b"<ListBucketResult>" + b"<a/>" * (_M // 4 - 20) + b"</ListBucketResult>",
    "elements in each other": b"<ListBucketResult>" + b"<a>" * (_M // 7 - 20) + b"</a>" * (_M // 7 - 20)
    + b"</ListBucketResult>",
    "a name": page(item("run/" + "k" * (_M - 1000), 1)),
    "a version": page(item("run/a", 1).replace("<Size>", f"<ETag>{'e' * (_M - 1000)}</ETag><Size>")),
    "a token": page(token="t" * (_M - 1000)),
}  # fmt: skip


@pytest.mark.parametrize("name", _LARGE)
def test_large_pages(name: str) -> None:
    """Each page fits the limit for an answer, and would take many times as much memory; or more with each page."""
    with hostile_store(lambda request: request.is_listing and request.send(200, _LARGE[name])) as (store, server):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            list(store.list())
        assert server.num_requests == 1


def test_pages_whose_names_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are few, and long."""
    monkeypatch.setattr(requests, "MOST_LISTED_BYTES", 1 << 20)
    count = itertools.count()

    def answer(request: Request) -> bool:
        number = next(count)
        return request.send(
            200, page(*(item(f"run/{'k' * 1000}{index}", 1) for index in range(50)), token=str(number))
        )

    with hostile_store(answer) as (store, server):
        with pytest.raises(StorageError, match="too many"):
            list(store.list())
        assert server.num_requests < 30


@pytest.mark.parametrize("body", [b"<html><body>Log in</body></html>", b"<a/>", b"<Error2><Code>x</Code></Error2>"])
def test_another_page_is_not_an_empty_location(body: bytes) -> None:
    """A run would begin at step 0 beside its checkpoints."""
    with hostile_store(lambda request: request.is_listing and request.send(200, body)) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            RemoteFolder(store).steps()


def test_names_outside_of_the_prefix() -> None:
    """They are neither taken for names below it, nor are uploads of them aborted."""
    uploads = "".join(
        f"<Upload><Key>{key}</Key><UploadId>u</UploadId></Upload>"
        for key in ("checkpoint-5/a", "other/checkpoint-5/a", "run/checkpoint-5/a", "runs/checkpoint-5/a")
    )
    deleted: list[str] = []

    def answer(request: Request) -> bool:
        if request.is_listing:
            names = ("abc/checkpoint-5/safepoint-manifest.json", "ru", "run", "runs/checkpoint-6/a", "run/a")
            return request.send(200, page(*(item(name, 1) for name in names)))
        if request.command == "DELETE":
            deleted.append(request.key)
            return request.send(204)
        body = f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>"
        return request.command == "GET" and request.send(200, body.encode())

    with hostile_store(answer) as (store, _):
        assert [found.key for found in store.list()] == ["a"]
        assert store.sweep() == 1
    assert deleted == ["run/checkpoint-5/a"]


def _without_end(status: int, *methods: str) -> Callable[[Request], bool]:
    def answer(request: Request) -> bool:
        if request.command not in methods:
            return request.command == "HEAD" and request.send(403)
        request.send_response(status)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        block = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        while True:
            request.wfile.write(block)

    return answer


_CALLS: dict[str, Callable[[Any, float], object]] = {
    "PUT": lambda store, until_s: store.write("a", b"x", deadline_s=until_s),
    "DELETE": lambda store, until_s: store.delete("a", deadline_s=until_s),
    "GET": lambda store, until_s: store.stat("a", deadline_s=until_s),
}


@pytest.mark.parametrize("status", [200, 403, 500])
@pytest.mark.parametrize("method", _CALLS)
def test_a_body_without_end(method: str, status: int) -> None:
    """Of an answer that is not data; the server sends from one block."""
    with hostile_store(_without_end(status, method, "POST"), timeout_s=5) as (store, _):
        until_s = clock.monotonic_s() + 5
        before = peak_bytes()
        with contextlib.suppress(StorageError):
            _CALLS[method](store, until_s)
        assert clock.monotonic_s() < until_s + 15
    assert peak_bytes() - before < 200 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("upload_id", ["", " "])
def test_an_upload_without_a_name(upload_id: str, tmp_path: Path) -> None:
    """Its parts would be written as the object itself."""
    (tmp_path / "large").write_bytes(bytes(17 << 20))
    seen: list[str] = []

    def answer(request: Request) -> bool:
        seen.append(request.command)
        if request.command == "POST":
            body = f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            return request.send(200, body.encode())
        return "uploads" in request.path and request.send(200, b"<ListMultipartUploadsResult/>")

    with hostile_store(answer) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            store.upload("a", tmp_path / "large")
    assert "PUT" not in seen


def test_an_honest_server(tmp_path: Path) -> None:
    """The server of these tests is usable when no attack answers."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    with hostile_store(objects=objects_of(output.root)) as (store, _):
        inventory = Inventory(store)
        assert inventory.verify(inventory.item("checkpoint-10")) == ()
