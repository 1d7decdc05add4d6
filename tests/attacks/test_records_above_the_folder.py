"""A file called as a manifest lies in a folder above a run's output folder, or above the place of an export."""

import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import refuse_inside_checkpoint
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools import atomic_export
from safepoint.errors import UsageError
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore

_STRANGER = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which everyone may create files, such as /tmp, with a folder of this user."""
    folder = tmp_path / "shared"
    (folder / "mine").mkdir(parents=True)
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("name", [MANIFEST_NAME, PART_NAME])
@pytest.mark.parametrize("content", [b"", b"x", b"{}", b'{"format": "safepoint-checkpoint"}', b"[" * 100_000])
def test_a_file_that_is_no_record(shared: Path, name: str, content: bytes) -> None:
    """Only its name is that of a manifest. The run begins."""
    (shared / name).write_bytes(content)
    OutputFolder(shared / "mine" / "out").prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [MANIFEST_NAME, PART_NAME])
def test_a_valid_record_of_another_user(shared: Path, tmp_path: Path, name: str) -> None:
    """In a folder that everyone may write to, it decides nothing."""
    record = commit(prepared(tmp_path / "own"), 10) / MANIFEST_NAME
    (shared / name).write_bytes(record.read_bytes())
    os.chown(shared / name, _STRANGER, _STRANGER)
    OutputFolder(shared / "mine" / "out").prepare()
    os.unlink(shared / name)
    os.symlink(record, shared / name)
    os.chown(shared / name, _STRANGER, _STRANGER, follow_symlinks=False)
    OutputFolder(shared / "mine" / "out").prepare()


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file(shared: Path, kind: str) -> None:
    """It is not opened, and does not make the folder a checkpoint."""
    path = shared / MANIFEST_NAME
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    OutputFolder(shared / "mine" / "out").prepare()


@pytest.mark.parametrize("damage", ["none", "a byte", "all", "a later release"])
def test_a_checkpoint_of_this_user(tmp_path: Path, damage: str) -> None:
    """It receives no new files, even if its manifest is damaged or newer than this release."""
    folder = commit(prepared(tmp_path / "out"), 10)
    content = (folder / MANIFEST_NAME).read_bytes()
    if damage == "a byte":
        (folder / MANIFEST_NAME).write_bytes(content.replace(b'"step": 10', b'"step": 11'))
    elif damage == "all":
        (folder / MANIFEST_NAME).write_bytes(bytes(len(content)))
    elif damage == "a later release":
        (folder / MANIFEST_NAME).write_text(json.dumps({**json.loads(content), "version": 2}))
    with pytest.raises(UsageError, match="belongs to a checkpoint"):
        refuse_inside_checkpoint(folder / "plots")


def test_a_copy_of_a_checkpoint_under_another_name(tmp_path: Path) -> None:
    """Its valid manifest makes it a checkpoint."""
    folder = commit(prepared(tmp_path / "out"), 10).rename(tmp_path / "best")
    with pytest.raises(UsageError, match="belongs to a checkpoint"):
        refuse_inside_checkpoint(folder / "out")


def test_above_the_place_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket, an object with the name of a manifest decides nothing either; a manifest does."""

    def open_store(location: Location) -> FaultyStore:
        return FaultyStore(tmp_path / location.path)

    monkeypatch.setattr(atomic_export, "open_store", open_store)
    target = Location(scheme=Scheme.S3, bucket="bucket", path="team/models/mine")
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / MANIFEST_NAME).write_text("x")
    atomic_export.check_empty(target)
    record = commit(prepared(tmp_path / "own"), 10) / MANIFEST_NAME
    (tmp_path / "team" / MANIFEST_NAME).write_bytes(record.read_bytes())
    with pytest.raises(UsageError, match="which Safepoint writes"):
        atomic_export.check_empty(target)
