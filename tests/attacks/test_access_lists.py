"""Access control lists (POSIX ACLs) of the output folder, which new files in it get.

A list may let a group write and another user only read. The group's place in the mode is then the most that the list
may give to anyone, and not what the group may do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.foundation.files import FolderLock, is_locked
from tests.support.access_lists import set_list
from tests.support.checkpoints import prepared

_STRANGER = 65534
_HOLD = f"""
import fcntl, os, struct, sys
os.setgroups([]); os.setgid({_STRANGER}); os.setuid({_STRANGER})
try:
    file = os.open(sys.argv[1], os.O_RDONLY)
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    print("locked", flush=True)
except OSError as error:
    print(error.strerror, flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def claim_beside_reader(root: Path) -> str:
    """Let the reader take a shared lock, then claim the folder. Returns what the reader has said."""
    path = root / ".safepoint" / "lock"
    for folder in (root, *root.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        said = reader.stdout.readline().strip()
        lock = FolderLock.acquire(path, {"pid": 1})
        assert lock is not None
        assert is_locked(path)
        lock.release()
        reader.communicate(timeout=30)
    return said


@pytest.mark.parametrize("rights", [4, 5])
def test_a_reader_keeps_no_writer_out(rights: int, tmp_path: Path) -> None:
    """A shared lock of someone who may only read would stop every run."""
    output = prepared(tmp_path / "out")
    set_list(output.control, user=7, group=7, mask=7, stranger=(_STRANGER, rights), is_default=True)
    set_list(output.control, user=7, group=7, mask=7, stranger=(_STRANGER, 5))
    for path in (output.root, output.control):
        path.chmod(path.stat().st_mode | 0o055)
    (output.control / "lock").unlink(missing_ok=True)
    lock = FolderLock.acquire(output.control / "lock", {"pid": 1})
    assert lock is not None
    lock.release()
    assert claim_beside_reader(output.root) == "Permission denied"


def test_a_writer_reads_who_holds_the_lock(tmp_path: Path) -> None:
    """A user whom the list lets write may take the lock, and for that has to read its file."""
    output = prepared(tmp_path / "out")
    set_list(output.control, user=7, group=5, mask=7, stranger=(_STRANGER, 7), is_default=True)
    (output.control / "lock").unlink(missing_ok=True)
    lock = FolderLock.acquire(output.control / "lock", {"pid": 1})
    assert lock is not None
    lock.release()
    code = (
        f"import os, sys; os.setgroups([]); os.setgid({_STRANGER}); os.setuid({_STRANGER})\n"
        "file = os.open(sys.argv[1], os.O_RDWR); print('writes')"
    )
    for folder in (output.control, output.root, *output.root.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", code, output.control / "lock"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "writes\n", done.stderr
