"""Tests of safepoint.foundation.shared_folders.secret_keys: keys in Secrets that the kubelet has mounted.

The mounts are made in a mount namespace, as the kubelet makes them for a pod with an `fsGroup`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.errors import StorageError
from safepoint.foundation.shared_folders.secret_keys import load_key

_CODE = """
import os, subprocess, sys
from pathlib import Path
from safepoint.errors import StorageError
from safepoint.foundation.shared_folders.secret_keys import load_key
folder, kind, flags, owner, mode, groups = Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5], 8), sys.argv[6]
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
what = ["-t", "tmpfs", "tmpfs"] if kind == "tmpfs" else ["--bind", folder]
subprocess.run(["mount", *what, folder], check=True)
version = folder / "..2026_11_27"
version.mkdir()
(version / "images-key").write_bytes(b"k" * 32)
(folder / "..data").symlink_to("..2026_11_27")
(folder / "images-key").symlink_to("..data/images-key")
os.chown(version / "images-key", int(owner), 4242)
(version / "images-key").chmod(mode)
os.setgroups([int(group) for group in groups.split(",") if group])
subprocess.run(["mount", "-o", f"remount,bind,{flags}", folder], check=True)
try:
    print(load_key(folder / "images-key", what="key", hint="use another").decode())
except StorageError as error:
    print(error)
"""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root mounts file systems: mounts are NOT tested")


def load_mounted(folder: Path, *, kind: str, flags: str, owner: int, mode: int, groups: str) -> str:
    """The key in a mounted Secret, or the message why it is refused, in a process with these further groups."""
    arguments = [str(folder), kind, flags, str(owner), oct(mode), groups]
    command = ["unshare", "--mount", sys.executable, "-c", _CODE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("this system has no mount namespaces: mounts are NOT tested")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
@pytest.mark.parametrize("mode", [0o400, 0o440])
def test_a_secret_of_a_pod_with_a_group(mode: int, tmp_path: Path) -> None:
    found = load_mounted(tmp_path, kind="tmpfs", flags="ro", owner=0, mode=mode, groups="100,4242")
    assert found == "k" * 32


@needs_root
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"kind": "disk"}, "the users of group 4242 can read it"),
        ({"flags": "rw"}, "the users of group 4242 can read it"),
        ({"owner": 1000}, "the users of group 4242 can read it"),
        ({"groups": "100"}, "the users of group 4242 can read it"),
        ({"mode": 0o460}, "the users of group 4242 can read it"),
        ({"mode": 0o444}, "other users can read it"),
        ({"mode": 0o420}, "the users of group 4242 can change it"),
    ],
)
def test_another_file_that_a_group_can_read(case: dict[str, str | int], why: str, tmp_path: Path) -> None:
    """Each condition is needed: such a file may be one that root gives to a group of the machine."""
    usual = {"kind": "tmpfs", "flags": "ro", "owner": 0, "mode": 0o440, "groups": "100,4242"}
    assert why in load_mounted(tmp_path, **(usual | case))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o604])
def test_a_file_that_others_can_read(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(32))
    path.chmod(mode)
    with pytest.raises(StorageError, match=rf"can read it \(mode {mode:04o}\)"):
        load_key(path, what="key", hint="")
