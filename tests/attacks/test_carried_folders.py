"""An archive of a temporary folder in a process image is damaged, or has no file."""

from pathlib import Path

import pytest

from safepoint.errors import ImageError
from safepoint.transparent import carried as carried_module
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
    with set_down(carried(tmp_path, "empty")) as restored:
        assert restored == [tmp_path / "empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_after_a_damaged_archive_nothing_is_left(tmp_path: Path) -> None:
    part = carried(tmp_path, "first", "second")
    (part / "carried-1.img").write_bytes(b"x" * 2000)
    with pytest.raises(ImageError, match="damaged"), set_down(part):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["part-0"]


def test_a_folder_that_the_next_launcher_removes_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still there when it is looked for, and then gone."""
    part = carried(tmp_path, "folder")
    (tmp_path / "folder").mkdir()
    keep = carried_module.kept

    def removed(folder: Path) -> object:
        monkeypatch.setattr(carried_module, "kept", keep)
        folder.rmdir()
        return keep(folder)

    monkeypatch.setattr(carried_module, "kept", removed)
    with set_down(part) as restored:
        assert restored == [tmp_path / "folder"]
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["restoring"]
    assert not list((tmp_path / "folder").iterdir())
