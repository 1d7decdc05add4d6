"""A file that a frozen process had in a shared folder was deleted since, and another user has made it again.

CRIU compares sizes and modes only. So the other user would decide what is in the memory of the restored process.
"""

import os
import shutil
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from safepoint.errors import FreezeError, ImageError
from safepoint.transparent import planted
from safepoint.transparent.carried import carry, set_down
from safepoint.transparent.criu.records import open_paths, users_of
from safepoint.transparent.planted import refuse_planted_files, refuse_planted_folders
from tests.support.criu_images import message, varint

_STRANGER, _OWNER = 65533, 65532
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


def text(number: int, data: bytes) -> bytes:
    """A field with bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def part(folder: Path, paths: Iterable[Path], *, user: int = 0, deleted: Iterable[int] = ()) -> Path:
    """The files of CRIU for a process that has these paths open."""
    folder.mkdir()
    files = [
        record(
            message([(1, 1), (2, number)])[4:] + text(3, message([(1, number), (2, 0)])[4:] + text(6, bytes(path)))
        )
        for number, path in enumerate(paths, 1)
    ]
    (folder / "files.img").write_bytes(bytes(8) + b"".join(files))
    if deleted:
        (folder / "remap-fpath.img").write_bytes(bytes(8) + b"".join(message([(1, one), (2, 9)]) for one in deleted))
    credentials = message([(1, user), (2, user), (3, user), (4, user)])[4:]
    (folder / "core-7.img").write_bytes(bytes(8) + record(text(5, text(10, credentials))))
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def check(folder: Path) -> None:
    refuse_planted_files(folder, users_of(folder))


@pytest.mark.parametrize("inner", ["file", "folder/file"])
def test_a_file_of_another_user(inner: str, shared: Path, tmp_path: Path) -> None:
    """Also one in a folder of the other user. Files of this user and of the user of the process are used."""
    path = shared / inner
    path.parent.mkdir(exist_ok=True)
    path.touch()
    folder = part(tmp_path / "part", [path], user=_OWNER)
    assert users_of(folder) == {_OWNER}
    check(folder)
    os.chown(path, _OWNER, -1)
    check(folder)
    os.chown(shared / Path(inner).parts[0], _STRANGER, -1)
    with pytest.raises(
        FreezeError, match="was made by another user, and processes have it open; nothing was restored"
    ):
        check(folder)


def test_a_missing_file(shared: Path, tmp_path: Path) -> None:
    """Another user could make it before CRIU opens it. CRIU itself makes what was deleted before the freeze."""
    paths = [shared / "missing", shared / "folder" / "missing"]
    for number, path in enumerate(paths):
        with pytest.raises(FreezeError, match="is missing, and other users could make it"):
            check(part(tmp_path / f"part-{number}", [path]))
    check(part(tmp_path / "deleted", paths, deleted=[1, 2]))
    check(part(tmp_path / "elsewhere", [tmp_path / "missing"]))


def test_a_carried_folder_of_another_user(shared: Path, tmp_path: Path) -> None:
    """The launcher would read the records of its ranks there."""
    folder = shared / "safepoint-x"
    folder.mkdir()
    (folder / "file").touch()
    (tmp_path / "part").mkdir()
    carry([folder], tmp_path / "part")
    assert set_down(tmp_path / "part") == []
    os.chown(folder, _STRANGER, -1)
    with pytest.raises(FreezeError, match="made by another user"):
        set_down(tmp_path / "part")
    shutil.rmtree(folder)
    assert set_down(tmp_path / "part") == [folder]


def test_a_carried_folder_below_one_of_another_user(shared: Path, tmp_path: Path) -> None:
    folder = shared / "mine" / "safepoint-x"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    (tmp_path / "part").mkdir()
    carry([folder], tmp_path / "part")
    shutil.rmtree(folder)
    os.chown(shared / "mine", _STRANGER, -1)
    with pytest.raises(FreezeError, match="made by another user"):
        set_down(tmp_path / "part")
    assert list((shared / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["torchinductor_me", "mine/torchinductor"])
def test_a_folder_for_compiled_code(name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot it is missing. It is made before the processes run, and refused if it is another user's."""
    monkeypatch.setattr(planted, "user_of", lambda pid: _OWNER)
    cache = shared / name
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "environ").write_text(f"A=b\0TORCHINDUCTOR_CACHE_DIR={cache}\0HOME=~\0")
    refuse_planted_folders([7], tmp_path / "proc")
    assert (cache.stat().st_uid, cache.stat().st_mode & 0o777) == (_OWNER, 0o700)
    refuse_planted_folders([7], tmp_path / "proc")
    os.chown(shared / Path(name).parts[0], _STRANGER, -1)
    with pytest.raises(FreezeError, match="find code or settings there"):
        refuse_planted_folders([7], tmp_path / "proc")


@pytest.mark.parametrize("data", [bytes(8) + b"\x05\0\0\0ab", bytes(8) + b"\x01\0\0", bytes(8) + record(b"\x1a\x7f")])
def test_malformed_files(data: bytes, tmp_path: Path) -> None:
    """Such as those of a forger whose image is restored with `--trust`."""
    (tmp_path / "files.img").write_bytes(data)
    with pytest.raises(ImageError, match="cannot be read"):
        open_paths(tmp_path)
    (tmp_path / "carried-0.img").write_bytes(b"x" * 2048)
    with pytest.raises((ImageError, tarfile.TarError)):
        set_down(tmp_path)
