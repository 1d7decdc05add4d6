"""A file is exchanged for a link after it was chosen for an upload. The store gets no byte of its target."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.remote.extra_files import ExtraFiles
from safepoint.checkpoint.remote.publish import publish
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import SourceFile, UploadRecord, upload_verified
from safepoint.errors import SafepointError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from tests.support.checkpoints import commit, prepared
from tests.support.hostile_s3 import Request, hostile_store
from tests.support.stores import FaultyStore

_SECRET = b"PRIVATE KEY " * 100


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(_SECRET)
    return path


def _exchange(path: Path, target: Path) -> None:
    path.rename(path.with_name(f"{path.name}-away"))
    path.symlink_to(target)


def _assert_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not path.is_file() or b"PRIVATE" not in path.read_bytes(), path


@pytest.mark.parametrize("is_folder", [False, True])
def test_another_file_of_the_program(tmp_path: Path, secret: Path, is_folder: bool) -> None:
    """While the first file is uploaded, a stranger exchanges the last one, or the folder that it is in."""
    output = prepared(tmp_path / "out")
    output.root.joinpath("a").write_bytes(b"1")
    path = output.root / "plots" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(b"z" * 2000)
    exchanged: list[str] = []

    def before(name: str, key: str) -> None:
        if name == "upload" and not exchanged:
            exchanged.append(key)
            if is_folder:
                _exchange(path.parent, secret.parent)
            else:
                _exchange(path, secret)

    extra = ExtraFiles(
        output,
        RemoteFolder(FaultyStore(tmp_path / "store", before)),
        limit_bytes=10_000,
        is_first_node=True,
        report=lambda event: None,
    )
    for _ in range(3):
        try:
            extra.upload(progress=lambda count: None, deadline_s=None)
        except SafepointError:
            continue
    assert exchanged
    _assert_no_secret(tmp_path / "store")


def test_a_link_to_the_secret_of_a_job(tmp_path: Path) -> None:
    """A link may lead to another file in the folder, but not to Safepoint's own."""
    output = prepared(tmp_path / "out")
    (output.control / "job-secret").write_bytes(_SECRET)
    (output.root / "plot.png").symlink_to(output.control / "job-secret")
    store = LocalStore(Location.of_folder(tmp_path / "store"))
    extra = ExtraFiles(output, RemoteFolder(store), limit_bytes=10_000, is_first_node=True, report=lambda event: None)
    extra.upload(progress=lambda count: None, deadline_s=None)
    assert not list(store.list())


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_of_a_checkpoint(tmp_path: Path, secret: Path, is_folder: bool) -> None:
    """The uploader has read the manifest when a folder becomes a link."""
    folder = commit(prepared(tmp_path / "out"), 4, {0: {"sub/id_rsa": b"k" * len(_SECRET)}})
    manifest = read_manifest(folder)
    path = folder / "sub" if is_folder else folder / "sub" / "id_rsa"
    store = FaultyStore(tmp_path / "store", lambda name, key: None)

    def before(name: str, key: str) -> None:
        if name == "write" and not path.is_symlink():  # the mark, before the first file
            _exchange(path, secret.parent if is_folder else secret)

    store.before = before
    with pytest.raises(SafepointError):
        publish(RemoteFolder(store), folder, manifest, name=folder.name, sent=UploadRecord(None))
    assert path.is_symlink()
    _assert_no_secret(tmp_path / "store")


def test_between_the_digest_and_the_sending(tmp_path: Path, secret: Path) -> None:
    """The digest is right, because all bytes come from the file that was opened."""
    path = tmp_path / "optimizer.pt"
    path.write_bytes(b"good" * 500)
    entry = FileEntry.of("optimizer.pt", digest_file(path))

    class Store(LocalStore):
        def upload(self, key, source, **options):
            _exchange(path, secret)
            super().upload(key, source, **options)

    store = Store(Location.of_folder(tmp_path / "store"))
    assert upload_verified(store, "optimizer.pt", SourceFile("optimizer.pt", path, entry)) == entry
    assert (tmp_path / "store" / "optimizer.pt").read_bytes() == b"good" * 500


def test_between_two_requests_of_an_upload_in_parts(tmp_path: Path, secret: Path) -> None:
    """S3 receives the MD5 of a part, then its bytes."""
    path, size_bytes = tmp_path / "optimizer.pt", 17 << 20
    path.write_bytes(bytes(size_bytes))
    entry = FileEntry.of("optimizer.pt", digest_file(path))
    with secret.open("ab") as file:
        file.write(bytes(size_bytes - len(_SECRET)))
    parts: dict[str, bytes] = {}

    def answer(request: Request) -> bool:
        query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
        if request.command == "GET" and "uploads" in query:
            if not path.is_symlink():
                _exchange(path, secret)
            return request.send(200, b"<ListMultipartUploadsResult/>")
        if request.command == "POST" and "uploads" in query:
            body = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            return request.send(200, body)
        if request.command == "PUT":
            parts[query["partNumber"][0]] = request.body
            return request.send(200, b"", {"ETag": '"any"'})
        return request.command == "POST" and request.send(403, b"<Error><Code>AccessDenied</Code></Error>")

    with hostile_store(answer) as (store, _), pytest.raises(SafepointError):
        upload_verified(store, "optimizer.pt", SourceFile("optimizer.pt", path, entry))
    assert path.is_symlink()
    assert b"".join(parts[number] for number in sorted(parts)) == bytes(size_bytes)


def test_a_file_that_a_manifest_does_not_describe_any_more(tmp_path: Path) -> None:
    """Another size is noticed before a byte is sent."""
    path = tmp_path / "optimizer.pt"
    path.write_bytes(b"good")
    entry = FileEntry.of("optimizer.pt", digest_file(path))
    path.write_bytes(_SECRET)
    store = FaultyStore(tmp_path / "store")
    with pytest.raises(SafepointError, match="has changed"):
        upload_verified(store, "optimizer.pt", SourceFile("optimizer.pt", path, entry))
    assert not store.calls
