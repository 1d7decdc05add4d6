"""Archives that `torch.save` never writes: compressed records, two records of one name, a second directory.

4 MB of compressed zeros are 4 GB of tensors, and two readers of one archive could read different data.
"""

import io
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.weights.torch_file import read_torch_file
from safepoint.errors import CheckpointError
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.state.data_only import load_data, only_data
from tests.support.pickles import Call


def _records(value: Any) -> list[tuple[str, bytes]]:
    content = io.BytesIO()
    torch.save(value, content)
    archive = zipfile.ZipFile(content)
    return [(info.filename, archive.read(info)) for info in archive.infolist()]


def _compressed(path: Path, only: str = "data/0") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in _records({"w": torch.zeros(1 << 20)}):
            kind = zipfile.ZIP_DEFLATED if name.endswith(only) else zipfile.ZIP_STORED
            archive.writestr(name, content, compress_type=kind)


def _of_one_name(path: Path, *, first: Any, second: Any, rename: Callable[[str], str] = str) -> None:
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in _records(first):
            archive.writestr(name, content)
        for name, content in _records(second):
            archive.writestr(rename(name), content)


def _patched(path: Path, offset: int, value: bytes) -> None:
    """Change the entry of the first record in the directory."""
    torch.save({"w": torch.zeros(4)}, path)
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02") + offset
    content[at : at + len(value)] = value
    path.write_bytes(content)


def _two_directories(path: Path) -> None:
    """What lies before an archive moves its directory: `zipfile` finds the moved one, torch the one in front."""
    front = path.with_name("front")
    torch.save({"w": torch.zeros(4)}, front)
    torch.save({"w": torch.ones(4)}, path)
    path.write_bytes(front.read_bytes() + path.read_bytes())
    front.unlink()


def _in_two_folders(path: Path, *, is_evil_first: bool) -> None:
    """torch reads the folder of the first record, and a reader that looks for `data.pkl` may find the other one."""
    contents: dict[str, dict[str, bytes]] = {}
    for folder, value in (("good", torch.ones(4)), ("evil", torch.zeros(4))):
        torch.save({"w": value}, path)
        with zipfile.ZipFile(path) as archive:
            contents[folder] = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for folder in sorted(contents, reverse=not is_evil_first):
            for name, content in contents[folder].items():
                archive.writestr(f"{folder}/{name}", content)


def _followed(path: Path) -> None:
    torch.save({"w": torch.zeros(4)}, path)
    with path.open("ab") as file:
        file.write(bytes(1000))


def _overlapping(path: Path) -> None:
    """Eight records of the directory that are the same bytes of the file."""
    records = _records({"w": torch.zeros(1000)})
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records:
            archive.writestr(name, content)
        first = archive.getinfo(next(name for name, _ in records if name.endswith("data/0")))
        for number in range(1, 8):
            more = zipfile.ZipInfo(f"{first.filename}{number}")
            more.header_offset, more.CRC = first.header_offset, first.CRC
            more.file_size = more.compress_size = first.file_size
            archive.filelist.append(more)
        archive._didModify = True  # pyright: ignore


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a compressed storage": _compressed,
    "a compressed pickle": lambda path: _compressed(path, "data.pkl"),
    "a compressed record of no tensor": lambda path: _compressed(path, "version"),
    "two records of one name": lambda path: _of_one_name(path, first={"a": 1}, second={"a": 2}),
    "two records of one name, for a reader without cases": lambda path: _of_one_name(
        path, first={"a": 1}, second={"a": 2}, rename=str.upper
    ),
    "an encrypted record": lambda path: _patched(path, 8, struct.pack("<H", 1)),
    "a strongly encrypted record": lambda path: _patched(path, 8, struct.pack("<H", 0x41)),
    "a patched record": lambda path: _patched(path, 8, struct.pack("<H", 0x20)),
    "a record of another size": lambda path: _patched(path, 24, struct.pack("<I", 1 << 30)),
    "another directory": _two_directories,
    "two folders": lambda path: _in_two_folders(path, is_evil_first=False),
    "two folders, the other one first": lambda path: _in_two_folders(path, is_evil_first=True),
    "bytes after the archive": _followed,
    "records on top of each other": _overlapping,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_torch_does_not_write(name: str, tmp_path: Path) -> None:
    """Whatever loads or examines it refuses it, with its name."""
    path = tmp_path / "scheduler.pt"
    HOSTILE[name](path)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"):
        load_data(path)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"):
        load_data(path, mmap=True)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"), only_data(tmp_path):
        torch.load(path, weights_only=False)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"), path.open("rb") as file, only_data(tmp_path):
        torch.load(file, weights_only=False)
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"):
        load_state(tmp_path, {"scheduler": {}})
    with pytest.raises(CheckpointError, match=r"scheduler\.pt"):
        read_torch_file(path)


@pytest.mark.parametrize("is_evil_first", [True, False])
def test_the_record_that_is_checked_is_the_one_that_is_loaded(is_evil_first: bool, tmp_path: Path) -> None:
    evil, good = {"called": Call(tmp_path / "called")}, {"called": 1}
    first, second = (evil, good) if is_evil_first else (good, evil)
    _of_one_name(tmp_path / "a.pt", first=first, second=second)
    with pytest.raises(CheckpointError):
        load_data(tmp_path / "a.pt")
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("content", [{}, {"w": torch.zeros(5, 3)}, [torch.zeros(0)], {"A": 1, "a": torch.ones(2)}])
def test_archives_of_torch(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    load_data(tmp_path / "a.pt")
    with (tmp_path / "a.pt").open("rb") as file:
        load_data(file)
    buffer = io.BytesIO(b"before" + (tmp_path / "a.pt").read_bytes())
    buffer.seek(6)
    load_data(buffer)
