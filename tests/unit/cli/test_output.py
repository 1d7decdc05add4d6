"""Files that a user names: whole or not at all, and nothing but a file is replaced."""

import os
import stat
from pathlib import Path

import pytest

from safepoint.cli.output import write_file
from safepoint.errors import StorageError
from tests.support.commands import safepoint


def test_a_file_is_replaced(project: Path) -> None:
    path = project / "file"
    for data in (b"one", b"two"):
        write_file(path, data, option="-o")
        assert path.read_bytes() == data
    assert list(project.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_anything_else_is_kept(make: object, project: Path) -> None:
    """A pipe stands for a device, which only root can make."""
    path = project / "there"
    make(path)  # type: ignore[operator]
    kind = stat.S_IFMT(path.lstat().st_mode)
    with pytest.raises(StorageError, match="is not a regular file; nothing was written") as raised:
        write_file(path, b"data", option="--svg")
    assert "give another path with --svg" in str(raised.value)
    assert stat.S_IFMT(path.lstat().st_mode) == kind
    assert list(project.iterdir()) == [path]


def test_a_folder_that_is_missing(project: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written: No such file"):
        write_file(project / "missing" / "file", b"data", option="-o")


@pytest.mark.parametrize(
    "words", [("pack", "-o"), ("plan", "interval", "--mtbf", "4h", "--stall", "2s", "--svg")], ids=["pack", "plan"]
)
def test_commands_keep_it(words: tuple[str, ...], project: Path) -> None:
    """Every command that writes a file of its user's choice."""
    os.mkfifo(project / "pipe")
    done = safepoint(*words, project / "pipe")
    assert done.code == StorageError.exit_code
    assert "is not a regular file" in done.stderr
    assert stat.S_ISFIFO((project / "pipe").stat().st_mode)
