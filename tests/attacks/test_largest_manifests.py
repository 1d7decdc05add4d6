"""The largest checkpoint that Safepoint writes can be listed, verified, uploaded and resumed; a larger one is refused
when it is saved, and not when it is needed."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.commit import FolderDestination, commit
from safepoint.checkpoint.format import sealed_record
from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, NodePart
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.remote.fetch import check_listing, create_files, fetch, windows_of
from safepoint.checkpoint.remote.publish import Published, publish
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import upload_record
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import ManifestError, SaveError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from tests.support.checkpoints import commit as commit_small
from tests.support.checkpoints import describe, prepared

# A letter that takes 4 bytes in the name of a file takes 12 in a manifest. So few files make a large manifest, and
# each path still fits into the key of an object, 1024 bytes.
_LETTER = "\N{GRINNING FACE}"
_FOLDER = "/".join([_LETTER * 60] * 3)
_EMPTY = digest_bytes(b"")


def _entry(number: int) -> FileEntry:
    return FileEntry(path=f"{_FOLDER}/{_LETTER * 40}{number:06}", size_bytes=0, digest=_EMPTY)


def _largest(limit: int) -> Manifest:
    """A manifest of as many files as fit."""
    one, two = (len(describe(20)(tuple(map(_entry, range(count)))).to_bytes()) for count in (1, 2))
    count = (limit - one) // (two - one) + 1
    return describe(20)(tuple(map(_entry, range(count))))


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where the machine has one, because the test makes many small files durable."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    import shutil
    import tempfile

    place = Path(tempfile.mkdtemp(dir=memory))
    yield place
    shutil.rmtree(place)


def _write(folder: Path, manifest: Manifest) -> None:
    (folder / _FOLDER).mkdir(parents=True)
    for entry in manifest.files:
        (folder / entry.path).touch()


@pytest.mark.parametrize(
    "limit",
    [1 << 20, pytest.param(MAX_MANIFEST_BYTES, marks=[pytest.mark.long, pytest.mark.timeout(3000)])],
)
def test_the_largest(limit: int, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is committed, listed, verified, uploaded, fetched and found by a resume."""
    monkeypatch.setattr("safepoint.checkpoint.format.verify.MAX_MANIFEST_BYTES", limit)
    monkeypatch.setattr(sealed_record, "MAX_RECORD_BYTES", limit)
    for module in ("remote_folder", "publish", "verified_upload"):
        monkeypatch.setattr(f"safepoint.checkpoint.remote.{module}.MAX_MANIFEST_BYTES", limit)
    manifest = _largest(limit)
    assert limit - 5000 < len(manifest.to_bytes()) <= limit
    output = prepared(roomy / "run")
    commit_small(output, 10)
    working = output.work / "new"
    _write(working, manifest)
    commit(FolderDestination(working, output.root / "checkpoint-20", trash=output.trash), manifest)

    inventory = Inventory(LocalStore(Location.of_folder(output.root)))
    item = inventory.item()
    assert (item.name, item.num_files, item.is_complete) == ("checkpoint-20", len(manifest.files), True)
    assert inventory.verify(item) == ()
    found = newest_valid(output.root, rejected=lambda path, fault: None)
    assert found == (output.root / "checkpoint-20", manifest)

    store = LocalStore(Location.of_folder(roomy / "store"))
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="a", since="", host=""))
    record = read_manifest(output.root / "checkpoint-20")
    for result in (Published.NOW, Published.BEFORE):
        sent = upload_record(output, "checkpoint-20")
        published = publish(remote, output.root / "checkpoint-20", record, name="checkpoint-20", sent=sent)
        assert published is result
    assert remote.manifest(20) == manifest
    check_listing(store, "checkpoint-20", manifest)
    fetched = roomy / "fetched"
    create_files(manifest.files, fetched)
    fetch(store, "checkpoint-20", windows_of(manifest.files), fetched)
    commit(FolderDestination(fetched, roomy / "checkpoint-20", trash=None), manifest)
    assert verify(roomy / "checkpoint-20").is_valid


def _one_more(manifest: Manifest) -> Manifest:
    return dataclasses.replace(manifest, files=(*manifest.files, _entry(len(manifest.files))))


def test_one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with a message, and the checkpoint before it stays, also one of the same step."""
    limit = 1 << 20
    monkeypatch.setattr(sealed_record, "MAX_RECORD_BYTES", limit)
    manifest = _one_more(_largest(limit))
    output = prepared(tmp_path / "run")
    before = commit_small(output, 20)
    working = output.work / "new"
    _write(working, manifest)
    with pytest.raises(SaveError, match=f"at most {limit} can be read") as refusal:
        commit(FolderDestination(working, output.root / "checkpoint-20", trash=output.trash), manifest)
    assert str(refusal.value.hint).startswith("save fewer and larger files in a checkpoint")
    assert verify(before).is_valid
    remote = RemoteFolder(LocalStore(Location.of_folder(tmp_path / "store")))
    with pytest.raises(SaveError):
        StoreDestination(remote, "checkpoint-20").begin(manifest)
    assert not list(remote.store.list())


@pytest.mark.long
def test_the_limit_itself() -> None:
    """As a release has it: what is written can be read, and one file more cannot be written."""
    manifest = _largest(MAX_MANIFEST_BYTES)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    with pytest.raises(SaveError):
        _one_more(manifest).to_bytes()


def test_the_part_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record contains the manifest and more, so it reaches the limit earlier; it is refused in the same way."""
    monkeypatch.setattr(sealed_record, "MAX_RECORD_BYTES", 1 << 20)
    manifest = _largest(1 << 20)
    paths = tuple(entry.path for entry in manifest.files)
    part = NodePart(node=0, num_nodes=2, paths=paths, manifest=manifest)
    working = tmp_path / "working"
    _write(working, manifest)
    with pytest.raises(SaveError, match="can be read"):
        commit(FolderDestination(working, tmp_path / "checkpoint-20", trash=None), part)
    assert not (tmp_path / "checkpoint-20").exists()
    half = manifest.files[: len(manifest.files) // 3]
    part = NodePart(
        node=0,
        num_nodes=2,
        paths=tuple(entry.path for entry in half),
        manifest=dataclasses.replace(manifest, files=half),
    )
    assert NodePart.from_bytes(part.to_bytes()) == part
    assert not (working / MANIFEST_NAME).exists()


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1.5", b"-0"])
def test_more_values_than_a_record_has(value: bytes) -> None:
    """64 MiB of empty lists would take 3 GB of memory."""
    data = b'{"a":[' + (value + b",") * 1_000_000 + value + b"]}"
    with pytest.raises(ManifestError, match="more JSON values"):
        Manifest.from_bytes(data)


def test_strings_are_no_values() -> None:
    """Neither in names, nor in a string that does not end."""
    files = tuple(dataclasses.replace(_entry(number), path=f"{number:05}" + '[{,"' * 50) for number in range(6000))
    manifest = dataclasses.replace(_largest(1 << 20), files=files)
    assert len(manifest.to_bytes()) > 1 << 20
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    with pytest.raises(ManifestError, match="not JSON"):
        Manifest.from_bytes(b'{"a":"' + b'\\"' * 1_000_000)


def test_files_below_files() -> None:
    """They are found whatever stands between them in the order of their names."""
    manifest = _largest(1 << 20)
    for paths in (["a", "a/b"], ["a", "a-b", "a/b"], ["a/b", "a/b!", "a/b/c/d"]):
        files = tuple(dataclasses.replace(_entry(0), path=path) for path in paths)
        with pytest.raises(ValueError, match="is below another file"):
            dataclasses.replace(manifest, files=files)
    files = tuple(dataclasses.replace(_entry(0), path=path) for path in ("a", "a-b", "ab/c"))
    assert dataclasses.replace(manifest, files=files).files == files
