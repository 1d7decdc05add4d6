"""A process that root freezes is in namespaces of its user, who decides which program is at the path of CRIU."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from safepoint.errors import FreezeError
from safepoint.foundation.processes import name_of, number_inside, tree_of
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.program import Criu
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="root makes namespaces with unshare"
)
_OF_ROOT = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""As a restore makes them."""
_OF_USER = [*_OF_ROOT, "--user", "--map-root-user"]
_ELSEWHERE = ["unshare", "--pid", "--fork", "--kill-child", "--mount"]
_STRANGER = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


@contextmanager
def inner_process(command: list[str]) -> Iterator[int]:
    """A process below the first one of a new PID namespace."""
    with subprocess.Popen([*command, "sh", "-c", "sleep 600 & wait"], stderr=subprocess.DEVNULL) as outer:
        try:
            deadline_s = time.monotonic() + 30 * PATIENCE
            while not (found := [pid for pid in tree_of(outer.pid) if name_of(pid) == "sleep"]):
                if outer.poll() is not None:
                    pytest.skip("namespaces cannot be made here")
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            yield found[0]
        finally:
            outer.kill()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was to be run to enter the namespaces."""
    found: list[list[str]] = []
    monkeypatch.setattr(Criu, "run", lambda self, action, arguments, *, inside, **_: found.append(list(inside)))
    return found


def dump(pid: int, folder: Path) -> None:
    tree_dump.dump(Criu(path="criu", version="4.2"), pid, folder, log=folder / "log")


def test_namespaces_of_a_restore(commands: list[list[str]], tmp_path: Path) -> None:
    """CRIU enters those of the first process, which is root's: the frozen process could exchange its own ones."""
    with inner_process(_OF_ROOT) as pid:
        dump(pid, tmp_path)
        [[program, target, *_]] = commands
        first = int(target.partition("=")[2])
        assert (program, number_inside(first)) == ("nsenter", 1)


@pytest.mark.parametrize("user", [[], _STRANGER], ids=["root", "stranger"])
def test_namespaces_of_a_user(user: list[str], commands: list[list[str]], tmp_path: Path) -> None:
    """A user who is root in a namespace of their own may mount any program at any path. Nothing is run there."""
    with inner_process([*user, *_OF_USER]) as pid, pytest.raises(FreezeError, match="CRIU must not run as root"):
        dump(pid, tmp_path)
    assert commands == []


def test_a_first_process_of_another_user(commands: list[list[str]], tmp_path: Path) -> None:
    with (
        inner_process([*_OF_ROOT, *_STRANGER]) as pid,
        pytest.raises(FreezeError, match="CRIU must not run as root"),
    ):
        dump(pid, tmp_path)
    assert commands == []


def test_another_root_folder(commands: list[list[str]], tmp_path: Path) -> None:
    """As in a container: the program at the path of CRIU is one of the container."""
    names = [name for name in ("bin", "dev", "lib", "lib64", "usr") if Path("/", name).is_dir()]
    for name in names:
        (tmp_path / name).mkdir()
    mounts = " && ".join(f"mount --rbind /{name} {tmp_path / name}" for name in names)
    enter = ["sh", "-c", f'{mounts} && exec chroot {tmp_path} "$@"', "sh"]
    with (
        inner_process([*_ELSEWHERE, *enter]) as pid,
        pytest.raises(FreezeError, match="CRIU must not run as root"),
    ):
        dump(pid, tmp_path)
    assert commands == []
