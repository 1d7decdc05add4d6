"""FUSE file systems that another user has mounted in a folder that all users share, such as /tmp.

Such a file system may state this user as the owner of its files. It may be hidden from this user, and be unmounted
later, so that what lies below it appears. It may also never answer.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError, UsageError
from safepoint.foundation import environment
from safepoint.foundation.shared_folders.ownership import is_of_stranger, is_planted
from safepoint.foundation.volumes import mounts
from safepoint.training.outcome import launcher_folder
from safepoint.transparent.secret_folders import secret_folder
from tests.support.checkpoints import commit, prepared

_STRANGER = 65534
_OPTIONS = "rootmode=40000,user_id={user},group_id=0"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sticky folder that everyone may write to, without mounts."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n")
    return folder


def mount(point: Path, *, user: int = _STRANGER, kind: str = "fuse.liar") -> None:
    """Let the kernel list a FUSE file system. Its files seem to belong to this user, as those of the test do."""
    with mounts._MOUNTS.open("a") as table:
        table.write(f"40 22 0:50 / {point} rw,nosuid,nodev - {kind} evil rw,user_id={user},group_id={user}\n")


@pytest.mark.parametrize(("user", "kind"), [(_STRANGER, "fuse"), (_STRANGER, "fuseblk"), (_STRANGER, "fuse.sshfs")])
def test_a_checkpoint(user: int, kind: str, shared: Path) -> None:
    """No run resumes from it."""
    output = prepared(shared)
    path = commit(output, 4)
    assert list_checkpoints(shared) == [path]
    mount(path, user=user, kind=kind)
    assert is_of_stranger(path)
    assert list_checkpoints(shared) == []


def test_a_checkpoint_in_the_current_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = commit(prepared(shared), 4)
    monkeypatch.chdir(shared)
    assert list_checkpoints(Path()) == [Path(path.name)]
    mount(path)
    assert list_checkpoints(Path()) == []


@pytest.mark.parametrize("user", [0, os.geteuid()])
def test_a_mount_of_this_user_or_of_root(user: int, shared: Path) -> None:
    path = commit(prepared(shared), 4)
    mount(path, user=user)
    assert list_checkpoints(shared) == [path]


def test_an_output_folder(shared: Path) -> None:
    (shared / "out").mkdir()
    mount(shared / "out")
    assert is_planted(shared / "out" / "checkpoint-1")
    with pytest.raises(StorageError, match="belongs to another user"):
        OutputFolder(shared / "out").check_usable()


def test_the_home_folder_of_a_user_without_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    home = shared / f"safepoint-home-{os.geteuid()}"
    home.mkdir(mode=0o700)
    assert environment.home_folder() == str(home)
    mount(home)
    with pytest.raises(UsageError, match="set HOME"):
        environment.home_folder()


def test_folders_of_launchers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look into a file system that never answers would stop every start."""
    folder = shared / "safepoint-x"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    mount(folder)
    monkeypatch.setattr(launcher_folder, "_is_ours", lambda path: pytest.fail("the file system is asked"))
    monkeypatch.setattr(launcher_folder, "possible_parents", lambda: {shared})
    assert launcher_folder.running_launchers() == []
    launcher_folder._remove_abandoned(shared)
    assert (folder / "lock").exists()


def test_hidden_while_it_is_examined(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose it is cannot be seen, so it does not count as this user's. In a folder of this user alone it does."""
    look = os.lstat

    def hidden(path: str) -> os.stat_result:
        if os.path.basename(path) in {"checkpoint-9", f"safepoint-home-{os.geteuid()}"}:
            raise PermissionError(13, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "lstat", hidden)
    assert is_of_stranger(shared / "checkpoint-9")
    assert is_planted(shared / "checkpoint-9")
    assert not is_of_stranger(shared / "missing")
    assert not is_of_stranger(shared.parent / "checkpoint-9")
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UsageError, match="set HOME"):
        environment.home_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount without other programs")
def test_the_kernel_hides_it(tmp_path: Path) -> None:
    """With a FUSE file system of the kernel, in a mount namespace of its own."""
    folder = tmp_path / "shared"
    (folder / "checkpoint-9").mkdir(parents=True)
    folder.chmod(0o1777)
    code = (
        "import ctypes, os, sys\n"
        f"from {__name__} import really_mount, examine\n"
        "really_mount(sys.argv[1]); examine(sys.argv[1])"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code, str(folder / "checkpoint-9")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot be mounted" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this system mounts no FUSE file systems")
    assert done.stdout == "of a stranger: True\n", done.stderr


def really_mount(point: str) -> None:
    """Mount a FUSE file system as `fusermount` does for another user."""
    try:
        descriptor = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        sys.exit(f"cannot be mounted: {error}")
    options = f"fd={descriptor},{_OPTIONS.format(user=_STRANGER)}".encode()
    if ctypes.CDLL(None).mount(b"evil", os.fsencode(point), b"fuse", 6, options):
        sys.exit("cannot be mounted")


def examine(point: str) -> None:
    """Print whether a path counts as that of another user."""
    print("of a stranger:", is_of_stranger(point))


def test_a_folder_for_the_memory_of_processes(shared: Path) -> None:
    """Those that killed commands have left are deleted. A look into the file system could stop every freeze."""
    for name in ("one-left", "one-mounted"):
        (shared / name).mkdir(mode=0o700)
    mount(shared / "one-mounted")
    with secret_folder(shared, "one-"):
        assert not (shared / "one-left").exists()
        assert (shared / "one-mounted").exists()
