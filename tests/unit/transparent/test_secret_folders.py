"""Folders for the memory of processes: private, and deleted, also when their process was killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.transparent.secret_folders import secret_folder

_KILLED = """
import os, signal, sys
from pathlib import Path
from safepoint.transparent.secret_folders import secret_folder
with secret_folder(Path(sys.argv[1]), "one-") as folder:
    (folder / "file").write_text("secret")
    (folder / "inner").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_private_and_is_deleted(tmp_path: Path) -> None:
    with secret_folder(tmp_path, "one-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="failed"):
        fail(tmp_path)
    assert list(tmp_path.iterdir()) == []


def fail(parent: Path) -> None:
    with secret_folder(parent, "one-"):
        raise RuntimeError("failed")


def test_a_folder_that_is_held_stays(tmp_path: Path) -> None:
    """Several processes may have one at the same time."""
    with secret_folder(tmp_path, "one-") as first, secret_folder(tmp_path, "one-") as second:
        assert first != second
        assert first.exists()


def test_what_a_killed_process_has_left_is_deleted(tmp_path: Path) -> None:
    """And nothing else: no folder of another name, no file, and nothing behind a link."""
    subprocess.run([sys.executable, "-c", _KILLED, tmp_path], check=False)
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "one-link").symlink_to(elsewhere)
    (tmp_path / "one-file").touch()
    os.mkfifo(tmp_path / "one-pipe")
    with secret_folder(tmp_path, "one-"):
        assert not (tmp_path / left[0]).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "one-link", "one-file", "one-pipe"}
    assert (elsewhere / "file").exists()
