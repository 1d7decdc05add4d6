"""Measures the most disk space that is used while something runs."""

import threading
from pathlib import Path


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


__all__ = ["DiskWatch"]
