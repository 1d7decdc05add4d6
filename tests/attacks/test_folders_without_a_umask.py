"""A program that runs with the umask 0, as some services and containers do, makes folders in the user's home.

If others could write to one of the folders on the way to the settings, the keys and the caches, another user could
put a folder of their own there. A key of process images, for example, would be known to this user, and an image that
was made with it would be restored, and run.
"""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.jobs.local.attempt.workspace import private_cache
from safepoint.jobs.local.paths import make_private, state_folder
from safepoint.sdk.local import pod_folder
from safepoint.settings.run_settings import place_output
from safepoint.storage.location import Location
from safepoint.training.launcher.compile_cache import _private_folder
from safepoint.transparent.images.opening import open_images
from safepoint.transparent.protection.keys import own_key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A home folder in which nothing is, and no umask."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "SAFEPOINT_IMAGES_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(folder))
    before = os.umask(0)
    yield folder
    os.umask(before)


def _take_pod_folder() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pod_folder, "POD_FOLDER", os.environ["HOME"] + "/link")
        pod_folder.provide_pod_folder([os.environ["HOME"] + "/link/x"], None)


_MAKERS: dict[str, Callable[[], object]] = {
    "key": own_key,
    "state": lambda: make_private(state_folder()),
    "inputs": lambda: private_cache("inputs"),
    "outputs": lambda: OutputFolder(place_output("s3://bucket/x", local_dir=None).folder).prepare(),
    "compiled": lambda: _private_folder(Path(os.environ["HOME"], "scratch"), "torchinductor"),
    "pod": _take_pod_folder,
}


@pytest.mark.parametrize("maker", list(_MAKERS))
def test_no_other_user_can_replace_a_folder(maker: str, home: Path) -> None:
    """The folder that a program has made in the home folder, and all folders on the way to Safepoint's own."""
    _MAKERS[maker]()
    made = [
        path
        for path in home.rglob("*")
        if path.is_dir() and not path.is_symlink() and "safepoint" not in path.parts[len(home.parts) : -1]
    ]
    assert any(path.name == "safepoint" for path in made)
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_an_output_folder_that_the_user_has_named(home: Path) -> None:
    """Its mode, and that of the folders above it, is as the umask says: other users may have to write there."""
    OutputFolder(home / "a" / "out").prepare()
    assert [path.stat().st_mode & 0o777 for path in (home / "a", home / "a" / "out")] == [0o777] * 2


def test_images_of_a_job(home: Path) -> None:
    """They are made, in a private folder: a folder that others may write to would be refused at the deadline."""
    folder = make_private(state_folder()) / "images"
    with open_images(Location.of_folder(folder), None) as location:
        location.control_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
