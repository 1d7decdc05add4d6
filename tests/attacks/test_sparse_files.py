"""A sparse file of terabytes takes no room, and its digests are easy to compute. It must not keep a start busy."""

import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format import digest
from safepoint.checkpoint.format.digest import PART_BYTES, digest_bytes, digest_file, digest_of_parts
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry
from safepoint.checkpoint.format.verify import verify
from tests.support.checkpoints import commit, prepared, sealed

_ZEROS = digest_bytes(bytes(PART_BYTES))
_OTHER = digest_bytes(b"other")
_NUM_PARTS = 20_000
"""1.3 terabytes: minutes of reading, even of holes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return commit(prepared(tmp_path / "out"), 10)


def _add(folder: Path, parts: list[str], size_bytes: int) -> None:
    """Add a sparse file to a checkpoint, and to its manifest."""
    path = folder / "zeros"
    path.touch()
    try:
        os.truncate(path, size_bytes)
    except OSError:
        pytest.skip("the file system has no files of this size")
    record = json.loads((folder / MANIFEST_NAME).read_bytes())
    entry = {"path": "zeros", "size_bytes": size_bytes, "digest": digest_of_parts(parts), "parts": parts}
    record["files"] = sorted([*record["files"], entry], key=lambda one: one["path"])
    (folder / MANIFEST_NAME).write_bytes(sealed(record))


def _read_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Whether a checkpoint is valid, and how many bytes are read to find that out."""
    count, preadv = 0, os.preadv

    def counting(*arguments):
        nonlocal count
        found = preadv(*arguments)
        count += found
        assert count < 1 << 30, "the holes are read"
        return found

    monkeypatch.setattr(digest.os, "preadv", counting)
    return verify(folder).is_valid, count


def test_right_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that are holes are not read."""
    _add(folder, [_ZEROS] * _NUM_PARTS, _NUM_PARTS * PART_BYTES)
    assert _read_bytes(folder, monkeypatch)[0]


@pytest.mark.parametrize("number", [0, 1, _NUM_PARTS - 1])
def test_wrong_digests(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first part with another digest nothing more is read."""
    parts = [_ZEROS] * number + [_OTHER] * (_NUM_PARTS - number)
    _add(folder, parts, _NUM_PARTS * PART_BYTES)
    is_valid, count = _read_bytes(folder, monkeypatch)
    assert not is_valid
    assert count < 2 * PART_BYTES


@pytest.mark.parametrize("is_hole", [False, True])
@pytest.mark.parametrize("tail_bytes", [0, 1, PART_BYTES - 1])
def test_sparse_files_are_no_fault(tail_bytes: int, is_hole: bool, tmp_path: Path) -> None:
    """File systems that compress, and `cp --sparse`, make holes of zeros that a program has written."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 100)
        if is_hole:
            file.truncate(3 * PART_BYTES + tail_bytes)
        else:
            file.truncate(PART_BYTES)
            file.seek(PART_BYTES)
            for _ in range(2):
                file.write(bytes(PART_BYTES))
            file.write(bytes(tail_bytes))
    found = digest_file(path)
    entry = FileEntry.of("file", found)
    expected = digest_file(path, expected_bytes=entry.size_bytes, expected_parts=entry.parts)
    assert expected == found
    assert found.parts[1:3] == (_ZEROS, _ZEROS)


def test_a_file_without_holes_where_there_should_be_zeros(tmp_path: Path) -> None:
    """It is read, and its digest is its own."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2 * PART_BYTES))
    found = digest_file(path, expected_bytes=2 * PART_BYTES, expected_parts=[_ZEROS, _ZEROS])
    assert found.digest == digest_bytes(b"x" * PART_BYTES)
    os.truncate(path, 0)
    os.truncate(path, 2 * PART_BYTES - 1)
    expected = [_ZEROS, _ZEROS]
    assert digest_file(path, expected_bytes=2 * PART_BYTES, expected_parts=expected).parts[1] != _ZEROS


def test_a_file_that_is_larger_than_its_parts(tmp_path: Path) -> None:
    """Holes behind the end that it should have are not read, either."""
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1000 * PART_BYTES)
    found = digest_file(path, expected_bytes=2 * PART_BYTES, expected_parts=[_ZEROS, _ZEROS])
    assert found.size_bytes == 2 * PART_BYTES + 1
