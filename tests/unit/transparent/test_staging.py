"""Where raw pages are kept: in memory that nothing but a descriptor leads to, or in a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.transparent import staging
from safepoint.transparent.unnamed_tmpfs import open_unnamed_tmpfs

_MB = 1 << 20


@pytest.fixture
def unnamed() -> int:
    """The root folder of a file system of 64 MiB."""
    try:
        return open_unnamed_tmpfs(64 * _MB)
    except OSError as error:
        pytest.skip(f"this process may not mount file systems: {error}")


def test_no_path_leads_to_it(unnamed: int) -> None:
    """It has no mount point, and a child process does not get it."""
    try:
        device = os.fstat(unnamed).st_dev
        mounted = Path("/proc/self/mountinfo").read_text()
        assert f" {os.major(device)}:{os.minor(device)} " not in mounted
        assert os.fstat(unnamed).st_mode & 0o777 == 0o700
        check = f"import os\ntry: print(os.fstat({unnamed}).st_dev)\nexcept OSError: print('closed')"
        found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
        assert found.strip() != str(device)
    finally:
        os.close(unnamed)


def test_it_has_the_size_that_was_asked_for(unnamed: int) -> None:
    """A file that is larger does not fit."""
    try:
        assert os.fstatvfs(unnamed).f_blocks * os.fstatvfs(unnamed).f_frsize == 64 * _MB
        file = os.open("large", os.O_WRONLY | os.O_CREAT, dir_fd=unnamed)
        try:
            with pytest.raises(OSError, match="No space left"):
                os.posix_fallocate(file, 0, 65 * _MB)
        finally:
            os.close(file)
    finally:
        os.close(unnamed)


def test_raw_pages_are_deleted_while_another_process_has_them_open(unnamed: int, tmp_path: Path) -> None:
    """CRIU keeps the folder open for as long as processes run that it restored in a namespace of their own."""
    os.close(unnamed)
    with staging.staging(_MB, tmp_path) as stage:
        assert stage.is_in_memory
        assert stage.pages != stage.folder
        (stage.pages / "part-0").mkdir()
        (stage.pages / "part-0" / "pages-1.img").write_bytes(bytes(_MB))
        other = os.open(stage.pages, os.O_RDONLY)
    try:
        assert os.listdir(other) == []
        assert not stage.folder.exists()
    finally:
        os.close(other)


def test_where_it_cannot_be_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The raw pages are written to the folder, as they are without root's rights."""

    def refuse(size_bytes: int) -> int:
        raise PermissionError(1, f"{size_bytes} bytes cannot be mounted")

    monkeypatch.setattr(staging, "open_unnamed_tmpfs", refuse)
    with staging.staging(_MB, tmp_path) as stage:
        assert stage.pages == stage.folder
    assert not stage.folder.exists()
