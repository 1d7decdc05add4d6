"""An archive of a temporary folder in a process image is damaged, has no file, or has files of any kind."""

import os
import shutil
import stat
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
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["guard"]
    assert not list((tmp_path / "folder").iterdir())


def test_links_pipes_and_owners_are_restored(tmp_path: Path) -> None:
    """The keeper makes links to its memory when ranks restart. They lead out of the folder."""
    folder, part = tmp_path / "folder", tmp_path / "part-0"
    folder.mkdir()
    part.mkdir()
    (folder / "link").symlink_to("/proc/1/fd/3")
    os.mkfifo(folder / "pipe")
    (folder / "file").write_text("text")
    if os.getuid() == 0:
        for path in (folder / "file", folder):
            os.chown(path, 65533, 65532)
    owner = folder.stat().st_uid
    carry([folder], part)
    shutil.rmtree(folder)
    with set_down(part, {owner}) as restored:
        assert restored == [folder]
    assert os.readlink(folder / "link") == "/proc/1/fd/3"
    assert stat.S_ISFIFO((folder / "pipe").lstat().st_mode)
    assert (folder / "file").read_text() == "text"
    assert folder.stat().st_uid == (folder / "file").stat().st_uid == owner


def test_modes_are_restored(tmp_path: Path) -> None:
    """CRIU refuses a folder or a file that a process has open, if its mode differs. In a pod with an `fsGroup`,
    folders inherit setgid. No file gets setuid or setgid."""
    folder, part = tmp_path / "folder", tmp_path / "part-0"
    (folder / "inner").mkdir(parents=True)
    part.mkdir()
    (folder / "file").touch()
    (folder / "program").touch()
    modes = {folder: 0o2750, folder / "inner": 0o3770, folder / "file": 0o664, folder / "program": 0o6755}
    for path, mode in modes.items():
        path.chmod(mode)
    carry([folder], part)
    shutil.rmtree(folder)
    with set_down(part):
        pass
    modes[folder / "program"] = 0o755
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """By an archive that another program has made, and that is restored with `--trust`."""
    folder, part, outside = tmp_path / "folder", tmp_path / "part-0", tmp_path / "outside"
    for one in (folder, part, outside, folder / "in"):
        one.mkdir()
    (folder / "in" / "file").touch()
    (folder / "a").symlink_to(outside)
    carry([folder], part)
    shutil.rmtree(folder)
    data = (part / "carried-0.img").read_bytes()
    altered = data.replace(b"in/file" + bytes(93), b"a/file" + bytes(94))
    assert altered != data
    at = altered.index(b"a/file" + bytes(94))
    header = bytearray(altered[at : at + 512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (part / "carried-0.img").write_bytes(altered[:at] + bytes(header) + altered[at + 512 :])
    with pytest.raises(ImageError, match="damaged"), set_down(part):
        pass
    assert list(outside.iterdir()) == []
    assert not folder.exists()
