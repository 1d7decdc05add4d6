"""A server answers 200 and has done nothing, or does not say whether a listing is complete.

Safepoint counts a write as done only if the answer, or the object itself, shows it.
"""

import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.remote.publish import publish
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from tests.support.checkpoints import commit, prepared
from tests.support.hostile_s3 import Answer, Request, hostile_store, item, page
from tests.support.patience import PATIENCE

_ERROR = "<Error><Code>InternalError</Code></Error>"
_NO_RESULTS = {
    "nothing": b"",
    "blanks": b"<?xml version='1.0'?>\n   \n  ",
    "an error": _ERROR.encode(),
    "an error in a namespace": b"<s3:Error xmlns:s3='x'><s3:Code>InternalError</s3:Code></s3:Error>",
    "an error in capitals": _ERROR.upper().encode(),
    "JSON": b'{"Error": "InternalError"}',
    "HTML": b"<html>Log in</html>",
    "17 MiB of blanks, then an error": b" " * (17 << 20) + _ERROR.encode(),
    "an error in UTF-16": f"<?xml version='1.0' encoding='utf-16'?>{_ERROR}".encode("utf-16"),
    "half of a result": b"<CompleteMultipartUploadResult><Key>run/a</Key>",
    "another result": b"<CopyObjectResult><ETag>a</ETag></CopyObjectResult>",
}
_RESULT = b"\n  <?xml version='1.0'?>\n \n<s3:CompleteMultipartUploadResult xmlns:s3='x'/>"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Uploads:
    """A server that accepts parts, and answers the request that completes an upload with `body`.

    Args:
        body: the answer.
        arrives: whether the parts become the object with the first such request. Later requests of the upload are
            answered with 404.
        etag: the ETag of the object that has arrived; None for the ETag that S3 computes.
    """

    def __init__(self, body: bytes, *, arrives: bool = False, etag: str | None = None) -> None:
        self.body, self.arrives, self.etag = body, arrives, etag
        self.parts: dict[int, bytes] = {}
        self.is_over = False
        self.num_completed = 0

    def __call__(self, request: Request) -> bool:
        query, objects = request.path.partition("?")[2], request.server.objects
        if request.command == "GET" and "uploads=" in query:
            return request.send(200, b"<ListMultipartUploadsResult/>")
        if request.command == "POST" and "uploads=" in query:
            body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            return request.send(200, body)
        if request.command == "PUT" and "partNumber" in query:
            self.parts[int(query.partition("partNumber=")[2].partition("&")[0])] = request.body
            return request.send(200, b"", {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
        if "uploadId" in query and self.is_over:
            return request.send(404, b"<Error><Code>NoSuchUpload</Code></Error>")
        if request.command == "GET" and "uploadId" in query:
            return request.send(200, b"<ListPartsResult/>")
        if request.command == "POST":
            self.num_completed += 1
            if self.arrives:
                objects[request.key], self.is_over = b"".join(self.parts[one] for one in sorted(self.parts)), True
            return request.send(200, self.body)
        if request.command == "PUT":
            objects[request.key] = request.body
            return request.send(200, b"", {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
        if request.command == "DELETE":
            objects.pop(request.key, None)
            return request.send(204)
        if request.command == "HEAD" and self.is_over:
            digests = b"".join(hashlib.md5(self.parts[one]).digest() for one in sorted(self.parts))
            etag = self.etag or f"{hashlib.md5(digests).hexdigest()}-{len(self.parts)}"
            headers = {"ETag": f'"{etag}"', "Last-Modified": _DATE}
            return request.send(200, objects[request.key], headers)
        return False


def large_file(folder: Path) -> Path:
    (folder / "large").write_bytes(os.urandom((17 << 20) + 5))
    return folder / "large"


def soon() -> float:
    return clock.monotonic_s() + 2.5 * PATIENCE


@pytest.mark.parametrize("name", _NO_RESULTS)
def test_an_upload_without_a_result(name: str, tmp_path: Path) -> None:
    """The object is the older one; the upload fails, after the request was sent again."""
    uploads, source = Uploads(_NO_RESULTS[name]), large_file(tmp_path)
    with hostile_store(uploads, {"run/a": b"x" * source.stat().st_size}) as (store, _):
        with pytest.raises(TransientError):
            store.upload("a", source, deadline_s=soon())
    assert uploads.num_completed > 1


@pytest.mark.parametrize("name", ["nothing", "HTML", "half of a result"])
@pytest.mark.parametrize("etag", [None, "0" * 32])
def test_the_answer_is_lost_and_the_object_is_there(name: str, etag: str | None, tmp_path: Path) -> None:
    """The ETag shows that the object is the new one; if the server computes it in another way, the content does."""
    uploads, source = Uploads(_NO_RESULTS[name], arrives=True, etag=etag), large_file(tmp_path)
    with hostile_store(uploads) as (store, server):
        store.upload("a", source)
        assert server.objects["run/a"] == source.read_bytes()


@pytest.mark.parametrize("etag", ["0" * 32, "0" * 32 + "-3"])
def test_another_object_of_this_size(etag: str, tmp_path: Path) -> None:
    """The upload does not exist any more, and another writer's object has the same size and a new ETag."""
    source = large_file(tmp_path)

    class Others(Uploads):
        def __call__(self, request: Request) -> bool:
            if request.command == "POST" and "uploadId" in request.path:
                self.parts = {1: bytes(source.stat().st_size)}
            return super().__call__(request)

    with hostile_store(Others(b"", arrives=True, etag=etag)) as (store, _):
        with pytest.raises(ObjectNotFoundError):
            store.upload("a", source, deadline_s=soon())


def test_a_result_in_any_namespace(tmp_path: Path) -> None:
    """Blanks before the result are no error: S3 sends them while it joins the parts."""
    uploads = Uploads(_RESULT, arrives=True)
    with hostile_store(uploads) as (store, _):
        store.upload("a", large_file(tmp_path))
    assert uploads.num_completed == 1


@pytest.mark.parametrize("name", ["nothing", "blanks", "an error in a namespace"])
def test_a_step_that_is_saved_again(name: str, tmp_path: Path) -> None:
    """The manifest of the new checkpoint is not written over the files of the old one."""

    def files() -> dict[int, dict[str, bytes]]:
        return {0: {"model.bin": os.urandom((16 << 20) + 5)}}

    old, new = (commit(prepared(tmp_path / name), 20, files()) for name in ("old", "new"))
    objects = {f"run/checkpoint-20/{path.name}": path.read_bytes() for path in old.iterdir()}
    with hostile_store(Uploads(_NO_RESULTS[name]), objects) as (store, server):
        remote = RemoteFolder(store)
        remote.claim(Claim(run_id="r" * 32, attempt=1, attempt_id=uuid.uuid4().hex, since="now", host="here"))
        with pytest.raises(TransientError):
            publish(remote, new, read_manifest(new), name="checkpoint-20", sent=UploadRecord(None), deadline_s=soon())
        assert "run/checkpoint-20/safepoint-manifest.json" not in server.objects
        assert not [found for found in Inventory(store).items() if found.is_complete]


def test_a_part_without_an_etag(tmp_path: Path) -> None:
    """The answer to a part has no ETag: nothing shows that the part is there."""

    def answer(request: Request) -> bool:
        return "partNumber" in request.path and request.send(200, b"<html>Log in</html>")

    uploads = Uploads(_RESULT)
    with hostile_store(lambda request: answer(request) or uploads(request)) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            store.upload("a", large_file(tmp_path), deadline_s=soon())
    assert uploads.num_completed == 0


def test_a_small_object_without_an_etag() -> None:
    """The answer to a small object has no ETag: it is read back, and is not there."""
    with hostile_store(lambda request: request.command == "PUT" and request.send(200, b"<html/>")) as (store, _):
        with pytest.raises(StorageError):
            store.write("a", b"content", deadline_s=soon())


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>Log in</html>"), (200, _NO_RESULTS["an error in a namespace"]), (202, b"")]
)
def test_a_deletion_without_evidence(status: int, body: bytes) -> None:
    """S3 answers 204."""
    with hostile_store(lambda request: request.command == "DELETE" and request.send(status, body)) as (store, _):
        with pytest.raises(StorageError):
            store.delete("a", deadline_s=soon())


@pytest.mark.parametrize("status", [200, 204])
def test_a_deletion(status: int) -> None:
    """Some servers answer 200 without a body."""
    with hostile_store(lambda request: request.command == "DELETE" and request.send(status)) as (store, _):
        store.delete("a", deadline_s=soon())


# ---- listings ----------------------------------------------------------------------------------------------------

_TOKEN = "<NextContinuationToken>x</NextContinuationToken>"
_ENDS = {
    "in capitals": f"<IsTruncated>True</IsTruncated>{_TOKEN}",
    "a number": f"<IsTruncated>1</IsTruncated>{_TOKEN}",
    "empty": "<IsTruncated/>",
    "nothing": "",
    "nothing, with a token": _TOKEN,
    "false, with a token": f"<IsTruncated>false</IsTruncated>{_TOKEN}",
    "true, without a token": "<IsTruncated>true</IsTruncated>",
    "false and true": f"<IsTruncated>false</IsTruncated><IsTruncated>true</IsTruncated>{_TOKEN}",
    "more names": "<IsTruncated>false</IsTruncated><KeyCount>1000</KeyCount>",
    "fewer names": "<IsTruncated>false</IsTruncated><KeyCount>0</KeyCount>",
    "a count that is no number": "<IsTruncated>false</IsTruncated><KeyCount>x</KeyCount>",
}


def listing(more: str) -> Answer:
    body = f"<ListBucketResult>{item('run/a', 1)}{more}</ListBucketResult>".encode()
    return lambda request: request.is_listing and request.send(200, body)


@pytest.mark.parametrize("name", _ENDS)
def test_the_end_of_a_listing(name: str) -> None:
    """A listing ends only if the server says so: otherwise checkpoints would be missing without a message."""
    with hostile_store(listing(_ENDS[name])) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            list(store.list(deadline_s=soon()))


@pytest.mark.parametrize(
    "more", ["<IsTruncated>false</IsTruncated>", "<IsTruncated>false</IsTruncated><KeyCount>1</KeyCount>"]
)
def test_a_complete_listing(more: str) -> None:
    with hostile_store(listing(more)) as (store, _):
        assert [found.key for found in store.list()] == ["a"]


@pytest.mark.parametrize("kind", ["uploads", "parts"])
def test_the_end_of_other_listings(kind: str, tmp_path: Path) -> None:
    """Listings of uploads and parts, too: the rest of the uploads would not be aborted."""
    upload = "<Upload><Key>run/a</Key><UploadId>u</UploadId></Upload>"
    bodies = {
        "uploads": f"<ListMultipartUploadsResult>{upload}</ListMultipartUploadsResult>",
        "parts": "<ListPartsResult></ListPartsResult>",
    }
    more = "<IsTruncated>TRUE</IsTruncated><NextKeyMarker>run/b</NextKeyMarker>"

    def answer(request: Request) -> bool:
        found = "parts" if "uploadId" in request.path else "uploads"
        body = bodies[found].replace("</List", f"{more}</List") if found == kind else bodies[found]
        return request.command == "GET" and request.send(200, body.encode())

    with hostile_store(answer) as (store, _):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            store.upload("a", large_file(tmp_path), deadline_s=soon())


@pytest.mark.parametrize("size", ["1_0", "+5", " 5", "\u0665", "\uff15", "0x5", "5.0", "1e1"])
def test_sizes_that_only_python_reads(size: str) -> None:
    with hostile_store(lambda request: request.is_listing and request.send(200, page(item("run/a", size)))) as (
        store,
        _,
    ):
        with pytest.raises(StorageError, match="the answer is not a valid answer of an S3 server"):
            list(store.list())


_RANGES = ["bytes 5-4/100", "bytes 5-0/100", "bytes 5-100/100", "bytes 5-9/\u0661\u0660\u0660", "bytes 5-5/100"]
_READS: dict[str, Callable[..., object]] = {
    "a part": lambda store: store.read("a", start=5, length=10, deadline_s=soon()),
    "the rest": lambda store: store.read("a", start=5, deadline_s=soon()),
}


@pytest.mark.parametrize("stated", _RANGES)
@pytest.mark.parametrize("name", _READS)
def test_impossible_ranges(name: str, stated: str) -> None:
    """The end of a range is before its start, behind the object, or not the end that was requested."""
    headers = {"Content-Range": stated.encode().decode("latin-1")}
    with hostile_store(lambda request: request.send(206, b"x" * 10, headers)) as (store, _):
        with pytest.raises(StorageError, match="another range"):
            _READS[name](store)
