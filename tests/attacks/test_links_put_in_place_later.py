"""Another user of the folder puts links into it while a run waits for the lock: nothing outside is deleted."""

import os
import shutil
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import StorageError
from safepoint.foundation import files
from tests.support.checkpoints import prepared


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder outside."""
    home = tmp_path / "home"
    (home / "work" / "docs").mkdir(parents=True)
    (home / "work" / "docs" / "thesis").write_text("x")
    (home / "docs").mkdir()
    (home / "docs" / "thesis").write_text("x")
    return home


def _put_link(output: OutputFolder, name: str, home: Path) -> None:
    place = output.control if name == ".safepoint" else output.control / name
    shutil.rmtree(place)
    os.symlink(home, place)


@pytest.mark.parametrize("name", ["work", "trash"])
def test_while_a_run_waits(name: str, tmp_path: Path, home: Path) -> None:
    """The holder of the lock replaces a folder, then gives up the lock."""
    output = prepared(tmp_path / "out")
    held = files.FolderLock.acquire(output.control / "lock", {})
    assert held is not None

    def replace(_: str) -> None:
        _put_link(output, name, home)
        held.release()

    with pytest.raises(StorageError, match="link"):
        output.claim(wait_s=10, waiting=replace)
    second = OutputFolder(output.root)
    os.unlink(output.control / name)
    assert second.claim(wait_s=0, waiting=lambda who: None)  # the refused claim has left no lock
    second.release()
    assert (home / "docs" / "thesis").exists()


@pytest.mark.parametrize("name", ["work", "trash", ".safepoint"])
def test_after_the_claim(name: str, tmp_path: Path, home: Path) -> None:
    """Even then the leftovers of a link's target stay."""
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    _put_link(output, name, home)
    with pytest.raises(StorageError):
        output.clean()
    output.release()
    assert (home / "docs" / "thesis").exists()
    assert (home / "work" / "docs" / "thesis").exists()
