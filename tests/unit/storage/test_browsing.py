"""A folder of a store looks to its readers like a folder of this machine."""

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.checkpoint.weights.torch_file import read_torch_file
from safepoint.errors import CheckpointError, ObjectNotFoundError, StorageError
from safepoint.storage.browsing import ReadablePath, StorePath, browse
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from safepoint.storage.read_ahead import ByteRange, map_reads, stream_ahead


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in (("a/large", 300_000), ("a/small", 10), ("a/b/empty", 0), ("a/edge", 65_536), ("top", 5)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))
    return tmp_path


def look(folder: Path, prefix: str = "", **options: Any) -> StorePath:
    return browse(LocalStore(Location(scheme=Scheme.FILE, path=str(folder))), prefix, **options)


def test_the_same_questions_have_the_same_answers(folder: Path) -> None:
    """What is there, what it is called, and what is in it."""
    both: list[ReadablePath] = [folder / "a", look(folder, "a")]
    for path in both:
        assert path.name == "a"
        assert sorted(one.name for one in path.iterdir()) == ["b", "edge", "large", "small"]
        assert [one.is_dir() for one in sorted(path.iterdir())] == [True, False, False, False]
        assert [one.is_file() for one in sorted(path.iterdir())] == [False, True, True, True]
        assert not (path / "missing").is_file()
        assert not (path / "missing").is_dir()
        assert (path / "b" / "empty").read_bytes() == b""
        assert (path / "large").read_bytes() == (folder / "a" / "large").read_bytes()
        assert (path / ".").is_dir()
    assert str(look(folder, "a") / "b") == str(folder / "a" / "b")
    assert look(folder).is_dir()
    assert len({look(folder, "a") / "b", look(folder, "a") / "b"}) == 2, "of two looks"
    with pytest.raises(ObjectNotFoundError):
        (look(folder) / "missing").read_bytes()


def test_reading_here_and_there(folder: Path) -> None:
    """Any place and any length, as a file gives them; everything that was fetched has been noted."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    noted: set[int] = set()
    path = look(folder, on_read=lambda key, start, data: noted.update(range(start, start + len(data))))
    for name in ("large", "edge", "small"):
        noted.clear()
        with (folder / "a" / name).open("rb") as expected, (path / "a" / name).open("rb") as found:
            size = (folder / "a" / name).stat().st_size
            for _ in range(200):
                place, length = dice.randrange(size + 10), dice.choice([1, 30, 5000, 70_000])
                for file in (expected, found):
                    file.seek(place)
                assert found.read(length) == expected.read(length)
                assert found.tell() == expected.tell()
                assert set(range(place, min(size, place + length))) <= noted
            for file in (expected, found):
                file.seek(-3, os.SEEK_END)
            assert found.read() == expected.read()
            with pytest.raises(OSError, match="before the beginning"):
                found.seek(-1)


def test_small_reads_side_by_side_are_one(folder: Path) -> None:
    """Blocks are kept, until they are forgotten."""
    fetched: list[int] = []
    path = look(folder, on_read=lambda key, start, data: fetched.append(start))
    with (path / "a" / "large").open("rb") as file:
        for place in range(0, 10_000, 100):
            file.seek(place)
            file.read(50)
        assert fetched == [0]
        path.forget_blocks()
        file.seek(0)
        file.read(1)
    assert fetched == [0, 0]


def test_archives_and_weights_are_found(tmp_path: Path) -> None:
    """Through a store's ranges as from a file; damaged ones are reported."""
    tensors = {"a": torch.randn(100, 100), "b": torch.ones(3)}
    (tmp_path / "saved").mkdir()
    torch.save({"model": tensors, "name": "x"}, tmp_path / "file.pt")
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / "saved")
    ours, theirs = (read_torch_file(path) for path in (look(tmp_path) / "file.pt", tmp_path / "file.pt"))
    assert ours["name"] == theirs["name"]
    assert [(one.sizes, one.offset) for one in ours["model"].values()] == [
        (one.sizes, one.offset) for one in theirs["model"].values()
    ]
    found = [dcp_weights(path) for path in (look(tmp_path, "saved"), tmp_path / "saved")]
    places = [
        [(weight.shape, [(run.begin, run.num_bytes, run.offset, run.path.name) for run in weight.runs])]
        for weights in found
        for weight in weights
    ]
    assert places[:2] == places[2:]
    (tmp_path / "file.pt").write_bytes((tmp_path / "file.pt").read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="not a file of torch"):
        read_torch_file(look(tmp_path) / "file.pt")
    assert not zipfile.is_zipfile(tmp_path / "file.pt")


def test_a_change_is_seen(folder: Path) -> None:
    """Another content, or none."""
    path = look(folder, "a")
    assert path.changed() is None
    (folder / "a" / "small").write_bytes(b"other")
    assert path.changed() == "small"
    path = look(folder, "a")
    (folder / "a" / "edge").unlink()
    assert path.changed() == "edge"


def test_reading_ahead_keeps_the_order(tmp_path: Path) -> None:
    """Stretches larger and smaller than a read, one after the other; what fails comes out."""
    data = os.urandom(9_000_001)
    (tmp_path / "data").write_bytes(data)
    store = LocalStore(Location(scheme=Scheme.FILE, path=str(tmp_path)))
    places = [(0, 5_000_000), (7, 1), (8_999_999, 2), (3, 0), (100, 2 << 20), *((n, n) for n in range(50))]
    received = bytearray()
    stream_ahead((ByteRange(store, "data", start, length) for start, length in places), received.extend)
    assert received == b"".join(data[start : start + length] for start, length in places)
    with pytest.raises(StorageError):
        stream_ahead([ByteRange(store, "data", 8_999_999, 3)], received.extend)
    with pytest.raises(ZeroDivisionError):
        stream_ahead([ByteRange(store, "data", 0, 9_000_000)], lambda block: 1 // 0)
    assert map_reads(lambda number: number * 2, range(100)) == [2 * number for number in range(100)]
