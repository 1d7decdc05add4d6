"""A writer that was replaced cannot finish its uploads, on servers that list them in different ways."""

import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import SourceFile
from safepoint.errors import ConflictError, SafepointError, StorageError
from safepoint.storage.object_store import ObjectStore
from tests.support.s3_server import S3Server

SIZES = {"sub/model": 20 << 20, "optimizer": 17 << 20, "small": 3}


@pytest.fixture(
    params=[
        "moto",
        pytest.param("rgw", marks=pytest.mark.s3),
        pytest.param("minio", marks=[pytest.mark.s3, pytest.mark.minio]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


def claimed(server: S3Server, prefix: str, attempt: int) -> RemoteFolder:
    remote = RemoteFolder(server.store(prefix))
    remote.claim(Claim(run_id="run", attempt=attempt, attempt_id=str(attempt), since="", host="h"))
    return remote


def begun(remote: RemoteFolder, key: str) -> None:
    """Begin an upload as a writer does that dies before it ends."""
    assert isinstance(remote.store, ObjectStore)
    assert remote.store._requests is not None
    remote.store._requests.begin(remote.store._full(key), deadline_s=None)


def open_uploads(remote: RemoteFolder, keys: Mapping[str, int]) -> int:
    """How many unfinished uploads there were; afterwards there is none."""
    return remote.store.sweep(keys=keys)


@pytest.mark.parametrize("name", ["checkpoint-20", "final"])
def test_an_upload_whose_fence_passed_before_the_claim(server: S3Server, name: str, tmp_path: Path) -> None:
    """The successor has claimed the location and cleaned it: the upload is gone, and its writer learns that."""
    prefix = f"tests/{uuid.uuid4().hex}"
    older = claimed(server, prefix, 1)
    source = tmp_path / "model"
    source.write_bytes(bytes(SIZES["sub/model"]))
    destination = StoreDestination(older, name)
    destination.begin(files=SIZES)
    real, fences = older.fence, [0]

    def replaced_after(*, deadline_s: float | None = None) -> None:
        real(deadline_s=deadline_s)
        fences[0] += 1
        if fences[0] == 1:  # the fence of the large file: from here on the older writer sleeps
            claimed(server, prefix, 2).clean(keep=[])

    older.fence = replaced_after
    with pytest.raises(StorageError):
        destination.put(SourceFile("sub/model", source))
    assert [item.key for item in older.store.list()] == [".safepoint/attempt.json"]


def test_a_successor_of_the_same_name_sweeps_files_that_only_the_older_one_had(server: S3Server) -> None:
    """The mark lists the files of both writers until the commit."""
    prefix = f"tests/{uuid.uuid4().hex}"
    StoreDestination(claimed(server, prefix, 1), "checkpoint-20").begin(files=SIZES)
    begun(claimed(server, prefix, 1), "checkpoint-20/sub/model")
    newer = claimed(server, prefix, 2)
    StoreDestination(newer, "checkpoint-20").begin(files={"other": 1})
    assert newer.marked_files("checkpoint-20") == SIZES | {"other": 1}
    assert newer.clean(keep=["checkpoint-20"]) == 0
    StoreDestination(newer, "checkpoint-20").discard()
    assert open_uploads(newer, {f"checkpoint-20/{path}": size for path, size in SIZES.items()}) == 0
    assert not list(newer.store.list(UNFINISHED))


def test_uploads_and_files_of_others_stay(server: S3Server) -> None:
    """Neither a start, nor a deletion, nor the end of an upload touches what Safepoint has not written."""
    prefix = f"tests/{uuid.uuid4().hex}"
    remote = claimed(server, prefix, 1)
    StoreDestination(remote, "checkpoint-20").begin(files=SIZES)
    theirs = ["checkpoint-20/notes.tar", "checkpoint-30/weights", "data/x", ".safepoint/access-list.txt"]
    for key in theirs:
        remote.store.write(key, b"mine")
        begun(remote, f"{key}.part")
    begun(remote, "checkpoint-20/optimizer")
    remote.store.write("checkpoint-20/small", b"abc")
    assert claimed(server, prefix, 2).clean(keep=[]) == 2
    assert claimed(server, prefix, 3).delete("checkpoint-20")
    with pytest.raises(SafepointError):
        StoreDestination(remote, "checkpoint-20").begin(files=SIZES)
    keys = {item.key for item in remote.store.list()}
    assert keys == {*theirs, ".safepoint/attempt.json", f"{UNFINISHED}/checkpoint-20"}
    assert open_uploads(remote, {f"{key}.part": 1 for key in theirs}) == len(theirs)


def test_a_mark_that_someone_else_wrote(server: S3Server) -> None:
    """Its names lead nowhere: no file outside the checkpoint, and none of another format."""
    prefix = f"tests/{uuid.uuid4().hex}"
    remote = claimed(server, prefix, 1)
    remote.store.write("notes", b"mine")
    remote.store.write("checkpoint-2/a", b"mine")
    for number, text in enumerate(
        [b"", b"[]", b"{", b'{"files": 3}', b'{"files": {"../notes": 1}}', b'{"files": {"": 1, "a/../../notes": 99}}',
         b"[" * 70_000, b'{"files": ["a"]}', b'{"files": {"a": "1"}}', b'{"files": {"a": 1e400}}', b"\xff\xfe"]
    ):  # fmt: skip
        remote.store.write(f"{UNFINISHED}/checkpoint-2", text)
        newer = claimed(server, prefix, number + 2)
        newer.clean(keep=[])
        assert newer.marked_files("checkpoint-2") == {}
        assert {"notes", "checkpoint-2/a"} <= {item.key for item in newer.store.list()}


def test_a_replaced_writer_does_not_mark(server: S3Server) -> None:
    prefix = f"tests/{uuid.uuid4().hex}"
    older = claimed(server, prefix, 1)
    claimed(server, prefix, 2)
    with pytest.raises(ConflictError):
        older.mark("checkpoint-2", {"a": 1})
    assert not list(older.store.list(UNFINISHED))
