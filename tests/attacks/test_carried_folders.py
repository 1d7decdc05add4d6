"""An archive of a temporary folder in a process image is damaged, or has no file."""

from pathlib import Path

import pytest

from safepoint.errors import ImageError
from safepoint.transparent.carried import carry, set_down


def carried(tmp_path: Path, *names: str) -> Path:
    part = tmp_path / "part-0"
    part.mkdir()
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    carry(folders, part)
    for folder in folders:
        folder.rmdir()
    return part


def test_an_empty_folder_is_restored(tmp_path: Path) -> None:
    assert set_down(carried(tmp_path, "empty")) == [tmp_path / "empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_after_a_damaged_archive_nothing_is_left(tmp_path: Path) -> None:
    part = carried(tmp_path, "first", "second")
    (part / "carried-1.img").write_bytes(b"x" * 2000)
    with pytest.raises(ImageError, match="damaged"):
        set_down(part)
    assert [path.name for path in tmp_path.iterdir()] == ["part-0"]
