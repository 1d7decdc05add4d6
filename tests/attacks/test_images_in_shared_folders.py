"""The folder of process images is one to which other users may write.

`freeze` and `thaw` run as root, and CRIU follows links. Another user could read the memory of processes, or have the
log of CRIU written to any file.
"""

import os
from pathlib import Path

import pytest

from safepoint.errors import StorageError
from safepoint.transparent.images import location as location_module
from safepoint.transparent.images.location import ImageLocation
from tests.support.criu_images import add_image


@pytest.fixture(autouse=True)
def outside_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location_module, "is_seeing_all", lambda: True)


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("name", [".", ".safepoint", ".safepoint/images"])
def test_a_folder_that_others_may_write_to(tmp_path: Path, name: str, mode: int) -> None:
    location = ImageLocation(tmp_path / "images")
    control = location.folder / ".safepoint/images"
    control.mkdir(parents=True)
    os.chmod(location.folder / name, mode)
    with pytest.raises(StorageError, match="other users may write"), location.writing():
        pass
    with pytest.raises(StorageError, match="other users may write"):
        location.control_folder()
    assert os.listdir(control) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    location = ImageLocation(tmp_path / "images")
    location.folder.mkdir()
    os.chown(location.folder, 4711, 4711)
    with pytest.raises(StorageError, match="other users may write"), location.writing():
        pass


def test_a_folder_of_this_user_in_a_sticky_one(tmp_path: Path) -> None:
    """Such as /tmp: others cannot rename it."""
    os.chmod(tmp_path, 0o1777)
    location = ImageLocation(tmp_path / "images")
    add_image(location, tmp_path / "dump", {100: b"x" * 4096})
    assert location.names() == ["image-1"]
