"""A stranger begins any number of uploads in a bucket, or writes marks that name any number of large files.

A start and a save look for unfinished uploads. They must not take longer and longer, or fail, because of them.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.remote.publish import Published, publish
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools.atomic_export import MARK, clean_export
from safepoint.errors import AccessDeniedError
from safepoint.foundation import clock
from safepoint.storage.s3.bucket import S3Bucket
from safepoint.storage.s3.requests import ListingBudget, UploadId
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

_MANY = 30_000
_MOST_REQUESTS = 10_001


class Uploads(S3Bucket):
    """A bucket that notes for which prefixes its unfinished uploads are listed."""

    def __init__(self) -> None:
        self.prefixes: list[str] = []
        self.found: list[UploadId] = []
        self._bucket = "bucket"

    def find(
        self, prefix: str, *, deadline_s: float | None, budget: ListingBudget | None = None
    ) -> Iterator[UploadId]:
        self.prefixes.append(prefix)
        return iter(self.found)

    def abort(self, upload: UploadId, *, deadline_s: float | None) -> None:
        raise AccessDeniedError("AccessDenied")


class Bucket(FaultyStore):
    """A folder that stands for the bucket, whose uploads `Uploads` lists."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.uploads = Uploads()

    def sweep(
        self,
        *,
        only: Callable[[str], bool] = lambda key: True,
        keys: Iterable[str] = (),
        below: str = "",
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        prefix = f"{below}/" if below else ""
        return self.uploads.sweep(prefix, only=only, keys=keys, begun_before_s=begun_before_s, deadline_s=deadline_s)


@pytest.fixture
def store(tmp_path: Path) -> Bucket:
    output = prepared(tmp_path / "bucket")
    commit(output, 10)
    return Bucket(output.root)


def claimed(store: Bucket) -> RemoteFolder:
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id=uuid.uuid4().hex, since="now", host="here"))
    return remote


def mark(store: Bucket, key: str, num_files: int = _MANY) -> None:
    store.write(key, json.dumps({"files": {f"{number:x}": 1 << 25 for number in range(num_files)}}).encode())


def save(store: Bucket, folder: Path, step: int = 20, **files: Any) -> Published:
    saved = commit(prepared(folder), step, files.get("files"))
    return publish(claimed(store), saved, read_manifest(saved), name=saved.name, sent=UploadRecord(None))


def test_a_start(store: Bucket) -> None:
    mark(store, f"{UNFINISHED}/checkpoint-999")
    claimed(store).clean(keep=[])
    assert len(store.uploads.prefixes) <= _MOST_REQUESTS


def test_a_save(store: Bucket, tmp_path: Path) -> None:
    """The mark was there before. The files of the save itself are among those that are asked for."""
    mark(store, f"{UNFINISHED}/checkpoint-20")
    large = {0: {"model.bin": bytes((16 << 20) + 1)}}
    assert save(store, tmp_path / "out", files=large) is Published.NOW
    assert len(store.uploads.prefixes) <= _MOST_REQUESTS
    assert "checkpoint-20/model.bin" in store.uploads.prefixes


def test_a_save_lists_its_own_uploads_only(store: Bucket, tmp_path: Path) -> None:
    save(store, tmp_path / "out")
    assert store.uploads.prefixes == ["checkpoint-20/"]


def test_a_repair(store: Bucket) -> None:
    mark(store, MARK)
    clean_export(store, before_s=clock.wall_s() + 10)
    assert len(store.uploads.prefixes) <= _MOST_REQUESTS


def test_uploads_of_another_account(store: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store does not let this user end them: they stay, with a warning, and the start and the save go on."""
    mark(store, f"{UNFINISHED}/checkpoint-20", 1)
    store.uploads.found = [UploadId(key="checkpoint-20/0", upload_id="u", initiated="2026-01-01T00:00:00Z")]
    claimed(store).clean(keep=["checkpoint-999"])
    assert save(store, tmp_path / "out") is Published.NOW
    assert "an unfinished upload of another user stays" in caplog.text


def test_an_upload_that_several_listings_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is aborted once."""
    uploads: Any = Uploads()
    uploads.found = [
        UploadId(key="a", upload_id=f"u{number}", initiated="2026-01-01T00:00:00Z") for number in range(10)
    ]
    aborted: list[str] = []
    monkeypatch.setattr(uploads, "abort", lambda upload, deadline_s: aborted.append(upload.upload_id))
    assert uploads.sweep("", only=lambda key: True, keys=["a", "b"], begun_before_s=None, deadline_s=None) == 10
    assert len(aborted) == len(set(aborted)) == 10
