"""Measures the most disk space that is used while something runs; mounts small disks, and fills them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_FILLER = """
import os, sys, time
path, most, piece, pause_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with open(path, "ab", buffering=0) as file:
    while file.tell() < most:
        disk = os.statvfs(path)
        left = disk.f_bavail * disk.f_frsize - (1 << 20)
        if left > 0:  # otherwise wait until there is room again
            file.write(bytes(min(piece, most - file.tell(), left)))
        time.sleep(pause_s)
"""


@contextmanager
def small_disk(folder: Path, size_bytes: int, *options: str) -> Iterator[Path]:
    """A file system of this size at `folder`; the test is skipped if none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    how = ",".join([f"size={size_bytes}", *options])
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def filling(path: Path, most_bytes: int, *, within_s: float, num_pieces: int = 200) -> Iterator[None]:
    """Another process, which writes `most_bytes` to `path`, a piece at a time.

    While less than 1 MiB is free, it waits: on a disk without any room, a run's events would be lost too.
    """
    arguments = [str(path), str(most_bytes), str(max(1, most_bytes // num_pieces)), str(within_s / num_pieces)]
    process = subprocess.Popen([sys.executable, "-c", _FILLER, *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class DiskWatch:
    """Records the largest total size of the files in some folders; a context manager."""

    def __init__(self, *folders: Path) -> None:
        self.before_bytes = _size_of(folders)
        self.peak_bytes = self.before_bytes
        self._folders = folders
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def grown_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, _size_of(self._folders))

    def __enter__(self) -> "DiskWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _size_of(folders: tuple[Path, ...]) -> int:
    found = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        try:
            found += path.stat(follow_symlinks=False).st_blocks * 512 if path.is_file() else 0
        except OSError:  # gone again
            continue
    return found


__all__ = ["DiskWatch", "filling", "free_bytes", "small_disk"]
