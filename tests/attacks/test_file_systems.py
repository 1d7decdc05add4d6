"""File systems that lack something: no locks, links or exchange of names, times in seconds, names without case."""

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import files
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import parse_location
from safepoint.storage.store import ABSENT
from tests.support.folder_scenario import whole

Patch = pytest.MonkeyPatch


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def no_flock(code: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(code))


def no_record_locks(code: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fcntl, "fcntl", refusing(code))


def no_hard_links(code: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "link", refusing(code))


def no_symbolic_links(code: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "symlink", refusing(code))


def no_exchange(code: int, monkeypatch: Patch) -> None:
    class Library:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.renameat2 = lambda *_: -1

    monkeypatch.setattr(files.ctypes, "CDLL", Library)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)


def no_direct_writes(code: int, monkeypatch: Patch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


def no_space_reserved(code: int, monkeypatch: Patch) -> None:
    for name in ("posix_fallocate", "posix_fadvise"):
        monkeypatch.setattr(os, name, refusing(code))


def no_attributes(code: int, monkeypatch: Patch) -> None:
    for name in ("setxattr", "getxattr", "listxattr"):
        monkeypatch.setattr(os, name, refusing(code))


MISSING = (no_flock, no_record_locks, no_hard_links, no_symbolic_links, no_exchange, no_direct_writes)
CODES = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("missing", [*MISSING, no_space_reserved, no_attributes])
def test_what_a_file_system_lacks_is_done_without(
    missing: Callable[[int, Patch], None], code: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Commit, replace, prune, copy, export and repair work all the same."""
    missing(code, monkeypatch)
    whole(tmp_path / "out")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EXDEV], ids=errno.errorcode.get)
def test_file_systems_refuse_hard_links_in_several_ways(code: int, tmp_path: Path, monkeypatch: Patch) -> None:
    """FAT answers EPERM."""
    no_hard_links(code, monkeypatch)
    whole(tmp_path / "out")


@pytest.mark.parametrize("missing", [no_flock, no_hard_links])
def test_a_folder_as_a_store(missing: Callable[[int, Patch], None], tmp_path: Path, monkeypatch: Patch) -> None:
    """Conditional writes and uploads."""
    missing(errno.EOPNOTSUPP, monkeypatch)
    store = LocalStore(parse_location(str(tmp_path / "store")))
    store.write("a/b", b"first", condition=ABSENT)
    (tmp_path / "file").write_bytes(b"content")
    store.upload("a/c", tmp_path / "file")
    assert bytes(store.read("a/c")) == b"content"
    assert sorted(item.key for item in store.list()) == ["a/b", "a/c"]


MAKE = {
    "ext2 with times in seconds": "truncate -s 99M DISK && mkfs.ext2 -q -I 128 DISK && mount -o loop DISK AT",
    "ext4 without case": "truncate -s 99M DISK && mkfs.ext4 -q -O casefold DISK && mount -o loop DISK AT"
    " && chattr +F AT",
    "xfs": "truncate -s 320M DISK && mkfs.xfs -q DISK && mount -o loop DISK AT",
    "tmpfs": "mount -t tmpfs -o size=99m none AT",
    "ramfs": "mount -t ramfs none AT",
    "overlay": "mkdir DISK.low DISK.top && mount -t tmpfs none DISK.top && mkdir DISK.top/up DISK.top/work"
    " && mount -t overlay -o lowerdir=DISK.low,upperdir=DISK.top/up,workdir=DISK.top/work none AT",
}


def on_file_system(make: str, tmp_path: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python module with the folder of a new file system as its last argument, in a mount namespace."""
    at = tmp_path / "at"
    at.mkdir()
    mount = make.replace("DISK", str(tmp_path / "disk")).replace("AT", str(at))
    inside = ["unshare", "--mount", "sh", "-c"]
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root and `unshare`: this file system is NOT tested")
    tried = subprocess.run([*inside, f"({mount})"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this machine cannot mount it, it is NOT tested: {tried.stderr.strip()[-200:]}")
    for path in tmp_path.glob("disk*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return subprocess.run(
        [*inside, f'({mount}) && exec "$@"', "sh", sys.executable, "-m", *command, str(at / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": search_path()},
    )


def search_path() -> str:
    root = Path(__file__).parents[2]
    return os.pathsep.join((str(root / "src"), str(root)))


@pytest.mark.parametrize("kind", MAKE)
def test_real_file_systems(kind: str, tmp_path: Path) -> None:
    """Those that this kernel has."""
    done = on_file_system(MAKE[kind], tmp_path, "tests.support.folder_scenario")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
