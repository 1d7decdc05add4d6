"""`/workspace` is a folder to which other users may write, and one of them has made the links of a job in it.

The link leads to the right folder when it is examined. Its owner can make it point to other data later.
"""

import os
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.local.attempt import workspace

_STRANGER = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the data set, in a folder that belongs to root and that everyone may write to, as /tmp."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(workspace, "is_seeing_all", lambda: True)
    folder = tmp_path / "workspace"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder / "dataset"


def test_the_link_of_another_user(target: Path, tmp_path: Path) -> None:
    target.symlink_to(tmp_path / "cache" / "safepoint" / "workspace" / "dataset")
    os.chown(target, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(UsageError, match="could make it point to other files; nothing was started"):
        workspace.provide_workspace([str(target)])
    with pytest.raises(UsageError, match="could make it point to other files; nothing was started"):
        workspace.point(str(target), str(tmp_path))
    assert workspace.content_of(str(target)) is None


def test_the_link_of_another_user_to_the_folder(target: Path, tmp_path: Path) -> None:
    shared = target.parent / "workspace"
    shared.symlink_to(tmp_path / "cache" / "safepoint" / "workspace")
    os.chown(shared, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(UsageError, match="could make it point to other files"):
        workspace.provide_workspace([str(shared / "dataset")])


@pytest.mark.parametrize("exists", [True, False])
def test_everyone_may_replace_the_link(exists: bool, target: Path, tmp_path: Path) -> None:
    if exists:
        target.symlink_to(tmp_path / "cache" / "safepoint" / "workspace" / "dataset")
    target.parent.chmod(0o777)
    with pytest.raises(UsageError, match="other users could replace"):
        workspace.provide_workspace([str(target)])
    assert target.is_symlink() == exists


def test_a_folder_of_another_user(target: Path) -> None:
    target.parent.chmod(0o755)
    os.chown(target.parent, _STRANGER, _STRANGER)
    with pytest.raises(UsageError, match="other users could replace"):
        workspace.provide_workspace([str(target)])


def test_a_sticky_folder(target: Path, tmp_path: Path) -> None:
    """No other user can replace the link of this user."""
    for _ in range(2):
        workspace.provide_workspace([str(target)])
        workspace.point(str(target), str(tmp_path))
    assert os.path.realpath(target) == str(tmp_path)


def test_a_container(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume belongs to another user number there, and all processes are this user's."""
    monkeypatch.setattr(workspace, "is_seeing_all", lambda: False)
    os.chown(target.parent, 1000, 1000)
    workspace.provide_workspace([str(target)])
    workspace.point(str(target), str(tmp_path))
    assert os.path.realpath(target) == str(tmp_path)
