"""The temporary folder of a frozen launcher is gone at the thaw, and another user has made one in its place.

The restored launcher would take what it finds there as its own: a link, for example, as the file to which it appends
its events.
"""

import os
import shutil
from pathlib import Path

import pytest

from safepoint.errors import ImageError
from safepoint.transparent.carried import carry, set_down

_OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "safepoint-launcher"
    made.mkdir(0o700)
    (made / "events").write_text("own")
    return made


@pytest.fixture
def image(folder: Path, tmp_path: Path) -> Path:
    """The folder of a part, in which two folders are carried along."""
    part, first = tmp_path / "part-0", tmp_path / "a-folder-that-is-gone"
    part.mkdir()
    first.mkdir()
    (first / "file").touch()
    carry([first, folder], part)
    shutil.rmtree(first)
    return part


def refused(image: Path, folder: Path) -> None:
    with pytest.raises(ImageError, match="another user may have made"):
        set_down(image)
    assert not (folder.parent / "a-folder-that-is-gone").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user(image: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir(0o700)
    os.chown(folder, _OTHER_USER, _OTHER_USER)
    refused(image, folder)


def test_a_folder_to_which_everyone_may_write(image: Path, folder: Path) -> None:
    folder.chmod(0o777)
    refused(image, folder)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_something_else(image: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.rmtree(folder)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    refused(image, folder)


def test_the_own_folder_stays_as_it_is(image: Path, folder: Path) -> None:
    (folder / "events").write_text("later")
    assert set_down(image) == [folder.parent / "a-folder-that-is-gone"]
    assert (folder / "events").read_text() == "later"


def test_a_folder_that_is_gone_is_restored(image: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    assert folder in set_down(image)
    assert (folder / "events").read_text() == "own"


def test_after_a_damaged_archive_nothing_is_left(image: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    (image / "carried-1.img").write_bytes(b"x" * 2000)
    with pytest.raises(ImageError, match="damaged"):
        set_down(image)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["part-0"]


def test_an_empty_folder_is_restored(tmp_path: Path) -> None:
    part, folder = tmp_path / "part-0", tmp_path / "empty"
    part.mkdir()
    folder.mkdir()
    carry([folder], part)
    folder.rmdir()
    assert set_down(part) == [folder]
    assert not list(folder.iterdir())
