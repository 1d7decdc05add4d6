"""Tests of safepoint.checkpoint.remote.code."""

import hashlib
from pathlib import Path

import pytest

from safepoint.checkpoint.remote import code as code_module
from safepoint.checkpoint.remote.code import read_code, write_code
from safepoint.errors import CheckpointError, StorageError
from safepoint.storage.location import parse_location

CODE = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(CODE).hexdigest()


def test_code_in_a_folder(tmp_path: Path) -> None:
    """It is written once, and again if someone has changed it; a changed one is never used."""
    location = parse_location(str(tmp_path / "run/.safepoint/code" / f"{DIGEST}.zip"))
    with pytest.raises(StorageError, match="the code of the job is not in"):
        read_code(str(location), DIGEST)
    write_code(location, CODE, DIGEST)
    assert read_code(str(location), DIGEST) == CODE
    before = location.folder.stat().st_mtime_ns
    write_code(location, CODE, DIGEST)
    assert location.folder.stat().st_mtime_ns == before
    location.folder.write_bytes(CODE[:-1] + b"x")
    with pytest.raises(CheckpointError, match="has changed since it was submitted"):
        read_code(str(location), DIGEST)
    write_code(location, CODE, DIGEST)
    assert read_code(str(location), DIGEST) == CODE
    assert [path.name for path in location.folder.parent.iterdir()] == [location.name]


def test_code_that_was_changed_on_its_way_is_not_written(tmp_path: Path) -> None:
    location = parse_location(str(tmp_path / "code.zip"))
    with pytest.raises(CheckpointError, match="was changed on its way"):
        write_code(location, CODE[1:], DIGEST)
    assert not list(tmp_path.iterdir())


def test_a_file_of_any_size_in_its_place_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who may write to the location cannot fill the memory of a pod; a new submit replaces the file."""
    monkeypatch.setattr(code_module, "MOST_BYTES", len(CODE))
    location = parse_location(str(tmp_path / "code.zip"))
    location.folder.write_bytes(CODE + b"x")
    with pytest.raises(StorageError, match="it was not read"):
        read_code(str(location), DIGEST)
    write_code(location, CODE, DIGEST)
    assert read_code(str(location), DIGEST) == CODE
