"""A small answer of an S3 server makes the client work for a long time, or fills its memory."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.storage.s3 import multipart
from safepoint.storage.s3.file_parts import FilePart
from tests.attacks.test_hostile_servers import peak_bytes
from tests.support.hostile_s3 import Answer, Request, hostile_store
from tests.support.patience import PATIENCE

_PART = 16 << 20
_PEAK = 120 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of three parts, which takes no space."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2 * _PART + 5)
    return tmp_path / "large"


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """First byte of a part → how often its MD5 was computed."""
    found, md5_of = Counter[int](), multipart.md5_of

    def count(source: Any) -> bytes:
        if isinstance(source, FilePart):
            found[source.start] += 1
        return md5_of(source)

    monkeypatch.setattr(multipart, "md5_of", count)
    return found


class Listed:
    """A server with `num_uploads` unfinished uploads; `pages` has the pages with the parts of each."""

    def __init__(self, num_uploads: int, *pages: str) -> None:
        self.num_uploads, self.pages = num_uploads, pages
        self.asked: list[str] = []
        self.aborted: list[str] = []

    def __call__(self, request: Request) -> bool:
        query = request.path.partition("?")[2]
        if request.command == "GET" and "uploads=" in query:
            uploads = "".join(
                f"<Upload><Key>run/a</Key><UploadId>u{number}</UploadId>"
                f"<Initiated>2026-01-01T00:00:{number % 60:02}Z</Initiated></Upload>"
                for number in range(self.num_uploads)
            )
            return request.send(200, f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>".encode())
        if request.command == "GET" and "uploadId=" in query:
            number = int(query.partition("part-number-marker=")[2].partition("&")[0] or 0)
            self.asked.append(query)
            more = f"<IsTruncated>true</IsTruncated><NextPartNumberMarker>{number + 1}</NextPartNumberMarker>"
            end = more if number + 1 < len(self.pages) else "<IsTruncated>false</IsTruncated>"
            return request.send(200, f"<ListPartsResult>{self.pages[number]}{end}</ListPartsResult>".encode())
        if request.command == "DELETE":
            self.aborted.append(query)
            return request.send(204)
        return False


def part(number: object, size: int = _PART) -> str:
    return f'<Part><PartNumber>{number}</PartNumber><ETag>"{"0" * 32}"</ETag><Size>{size}</Size></Part>'


@pytest.mark.parametrize(
    "pages", [[part(1) * 1000], [part(1)] * 1000, [part(0)], [part(10_001)], [part(1) + part("1_0")]]
)
def test_parts_that_come_again(pages: list[str], large: Path, digested: Counter[int]) -> None:
    """A part is listed once, and its number is from 1 to 10,000."""
    with hostile_store(Listed(1, *pages)) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            store.upload("a", large)
    assert max(digested.values(), default=0) <= 1


def test_many_uploads_of_one_object(large: Path, digested: Counter[int]) -> None:
    """The parts of a few uploads are listed, no part of the file is read twice, and all uploads are aborted."""
    uploads = Listed(300, part(1) + part(2) + part(3, 5))
    with hostile_store(uploads) as (store, _), contextlib.suppress(StorageError):
        store.upload("a", large)
    assert len(uploads.asked) <= 8
    assert len(uploads.aborted) == 300
    assert max(digested.values()) == 1


def test_a_deadline_among_parts(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline holds while the parts of one page are compared."""
    begun: list[int] = []

    def slow(source: Any) -> bytes:
        begun.append(source.start)
        clock.sleep(1.5 * PATIENCE)
        return b""

    monkeypatch.setattr(multipart, "md5_of", slow)
    with hostile_store(Listed(1, part(1) + part(2) + part(3, 5))) as (store, _), pytest.raises(StorageError):
        store.upload("a", large, deadline_s=clock.monotonic_s() + PATIENCE)
    assert begun == [0]


# ---- memory ------------------------------------------------------------------------------------------------------

_M = 16 << 20


def _repeated(unit: str, head: str = "<ListBucketResult>", end: str = "</ListBucketResult>") -> Callable[[], bytes]:
    return lambda: head.encode() + unit.encode() * ((_M - 100) // len(unit.encode())) + end.encode()


def _numbered(unit: str) -> Callable[[], bytes]:
    def make() -> bytes:
        count = itertools.count()
        units, size = list[str](), 0
        while size < _M - 200:
            units.append(unit % next(count))
            size += len(units[-1])
        return f"<ListBucketResult {''.join(units)}></ListBucketResult>".encode()

    return make


_BODIES: dict[str, Callable[[], bytes]] = {
    "text in pieces": _repeated("ā\n"),
    "larger letters": _repeated("😀\n"),
    "text in sections": _repeated("<![CDATA[ā]]>"),
    "comments": _repeated("<!---->"),
    "instructions": _repeated("<?a?>"),
    "attributes": _numbered("a%x='' "),
    "namespaces": _numbered("xmlns:a%x='b' "),
    "namespaces of several elements": _repeated("<a xmlns:b='c' xmlns:d='e'/>"),
    "elements with attributes": _repeated(f"<a b='{'&#257;' * 50}'/>"),
}


def peak_of(answer: Answer, act: Callable[[Any], object]) -> int:
    """How much memory a call needs that ends with an error."""
    with hostile_store(answer, timeout_s=60) as (store, _):
        before = peak_bytes()
        with pytest.raises(StorageError):
            act(store)
    return peak_bytes() - before


@pytest.mark.parametrize("name", _BODIES)
def test_markup_that_takes_more_memory_than_its_bytes(name: str) -> None:
    body = _BODIES[name]()
    assert peak_of(lambda request: request.send(200, body), lambda store: list(store.list())) < _PEAK


_ACTS: dict[str, Callable[[Any, float], object]] = {
    "list": lambda store, until_s: list(store.list(deadline_s=until_s)),
    "write": lambda store, until_s: store.write("a", b"x", deadline_s=until_s),
    "read": lambda store, until_s: store.read("a", length=5, deadline_s=until_s),
}


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("name", _ACTS)
def test_chunks_of_two_bytes(name: str, status: int) -> None:
    """Python keeps each chunk as an object of its own."""

    def answer(request: Request) -> bool:
        request.send_response(status)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for _ in range(12):
            request.wfile.write(b"2\r\nab\r\n" * 200_000)
        request.wfile.write(b"0\r\n\r\n")
        return True

    peak = peak_of(answer, lambda store: _ACTS[name](store, clock.monotonic_s() + 5 * PATIENCE))
    assert peak < 60 << 20


def test_a_definition_of_an_entity_in_another_encoding() -> None:
    definition = "<?xml version='1.0' encoding='UTF-16'?><!DOCTYPE a [<!ENTITY x 'y'>]>"
    body = f"{definition}<ListBucketResult>&x;</ListBucketResult>"
    with hostile_store(lambda request: request.send(200, body.encode("utf-16"))) as (store, _):
        with pytest.raises(StorageError):
            list(store.list(deadline_s=clock.monotonic_s() + PATIENCE))
