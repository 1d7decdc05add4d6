"""A path leads through a link of this user, and then through a link that another user has made in a shared folder.

The user had made the second link too, and it was deleted, for example by a program that cleans /tmp. The link of the
other user leads to the right place at first, and elsewhere at any later time. Kernels follow it unless
`protected_symlinks` is set.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SafepointError
from safepoint.foundation.shared_folders.ownership import (
    PlantedError,
    is_planted,
    is_planted_folder,
    open_trusted,
    why_foreign,
)
from safepoint.foundation.temporary_folders.places import may_be_replaced
from safepoint.foundation.volumes import mounts
from safepoint.jobs.local import paths
from safepoint.transparent.images import location
from safepoint.transparent.images.location import ImageLocation

_STRANGER = 65533
_WHY = r"another user|others"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def way(shared: Path, tmp_path: Path) -> Path:
    """A folder of this user, by its path through both links."""
    (tmp_path / "own").mkdir(mode=0o700)
    (shared / "hop").symlink_to(tmp_path / "own")
    (tmp_path / "way").symlink_to(shared / "hop")
    (tmp_path / "own" / "file").touch(0o600)
    return tmp_path / "way"


def take(way: Path) -> None:
    """Let the second link belong to another user."""
    if os.getuid() != 0:
        pytest.skip("only root can give links to another user")
    os.chown(os.readlink(way), _STRANGER, -1, follow_symlinks=False)


def state_folder(folder: Path) -> object:
    paths._resolved.cache_clear()
    return paths.make_private(paths._resolved(folder))


_USES: dict[str, Callable[[Path], object]] = {
    "a file with keys": lambda way: open_trusted(way / "file").close(),
    "an output folder": lambda way: OutputFolder(way / "out").check_usable(),
    "the state folder": state_folder,
    "process images": lambda way: ImageLocation(way / "images").control_folder(),
}


@pytest.mark.parametrize("what", _USES)
def test_it_is_refused(what: str, way: Path) -> None:
    use = _USES[what]
    if what != "process images":  # other users may be able to rename the folder of all tests
        use(way)
    take(way)
    with pytest.raises((PlantedError, SafepointError), match="another user"):
        use(way)


def test_the_checks(way: Path) -> None:
    assert not is_planted(way / "file")
    assert why_foreign(way / "file") is None
    take(way)
    descriptor = os.open(way / "file", os.O_RDONLY)
    try:
        assert is_planted(way / "file", descriptor)
    finally:
        os.close(descriptor)
    assert is_planted(way / "file")
    assert is_planted(way)
    assert is_planted_folder(way)
    assert why_foreign(way / "file") is not None
    assert may_be_replaced(way, by_everyone=True)


@pytest.mark.parametrize("target", ["../shared/hop", "./../shared/hop/", "../way/../shared/hop"])
def test_relative_links(target: str, way: Path) -> None:
    take(way)
    other = way.parent / "own" / "other"
    other.symlink_to(target)
    assert is_planted(other / "file")


def test_links_without_end(shared: Path, tmp_path: Path) -> None:
    """A loop, and more links than the kernel follows."""
    (shared / "one").symlink_to("two")
    (shared / "two").symlink_to("one")
    assert not is_planted(shared / "one" / "file")
    for number in range(1500):
        (tmp_path / f"link-{number}").symlink_to(f"link-{number + 1}")
    assert not is_planted(tmp_path / "link-0")


@pytest.mark.parametrize("ask", [is_planted, is_planted_folder, may_be_replaced])
def test_a_file_system_that_never_answers(
    ask: Callable[[Path], bool], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user has mounted it at the name of a folder: nothing in it is looked up."""
    mount = shared / "mount"
    (mount / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(mount / "inner")
    table = tmp_path / "mountinfo"
    table.write_text(f"40 22 0:50 / {mount} rw - fuse evil rw,user_id={_STRANGER},group_id={_STRANGER},allow_other\n")
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    for name in ("lstat", "readlink", "stat", "open"):
        original, follows = getattr(os, name), name in {"stat", "open"}

        def call(
            path: str | Path,
            *others: object,
            original: Callable[..., object] = original,
            follows: bool = follows,
            **named: object,
        ) -> object:
            if Path(path).is_relative_to(mount / "inner") or (follows and Path(path) == tmp_path / "link"):
                pytest.fail(f"{path} is looked up")
            return original(path, *others, **named)

        monkeypatch.setattr(os, name, call)
    for path in (mount / "inner" / "file", tmp_path / "link"):
        assert ask(path)


@pytest.mark.parametrize("what", _USES)
def test_two_dots_after_a_link(what: str, shared: Path, tmp_path: Path) -> None:
    """The folder above the target of the link, and not the folder of the link, is on the way."""
    use, own = _USES[what], shared / "runs"
    (own / "run-7").mkdir(parents=True)
    (own / "file").touch(0o600)
    (tmp_path / "latest").symlink_to(own / "run-7")
    way = Path(f"{tmp_path}/latest/..")
    if what != "process images":  # other users may be able to rename the folder of all tests
        use(way)
    if os.getuid() != 0:
        pytest.skip("only root can give folders to another user")
    os.chown(own, _STRANGER, -1)
    with pytest.raises((PlantedError, SafepointError), match=_WHY):
        use(way)
    assert is_planted(way / "file")


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_link_in_a_folder_that_others_may_write_to(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sticky bit, others can replace the link, and so decide where what was made is looked for later."""
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "way").symlink_to(tmp_path / "own")
    (tmp_path / "outside").symlink_to(tmp_path / "scratch" / "way")
    is_open = may_be_replaced(tmp_path / "own")  # other users may be able to rename the folder of all tests
    assert may_be_replaced(tmp_path / "outside") is is_open
    (tmp_path / "scratch").chmod(mode)
    assert may_be_replaced(tmp_path / "scratch" / "way")
    assert may_be_replaced(tmp_path / "outside")
    assert may_be_replaced(tmp_path / "outside", by_everyone=True) is (mode == 0o777 or is_open)
    monkeypatch.setattr(location, "is_seeing_all", lambda: True)  # in a container, groups trust each other
    with pytest.raises(SafepointError, match=_WHY):
        ImageLocation(tmp_path / "outside" / "images").control_folder()
