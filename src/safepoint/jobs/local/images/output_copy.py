"""Lets processes that may be frozen write to files, and copies their output to that of this process.

A frozen process keeps its files, but not a pipe or a terminal of another process. In a pod, the output is a pipe.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

_NAMES = {1: "output.log", 2: "errors.log"}
"""The files, by the descriptor of this process to which they are copied."""
_LOOK_S = 0.1
_BLOCK_BYTES = 1 << 16


class OutputCopy:
    """The output and the error output of processes.

    Args:
        folder: where the files are made. What they contain already is not copied.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = {number: folder / name for number, name in _NAMES.items() if not is_file(number)}
        self._offsets = {number: _size_of(path) for number, path in self._paths.items()}
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def opened(self) -> Generator[dict[int, BinaryIO | None]]:
        """New files for processes that are started, by descriptor; None where an output of this process is a file."""
        for number, path in self._paths.items():
            path.unlink(missing_ok=True)
            self._offsets[number] = 0
        with contextlib.ExitStack() as stack:
            yield {
                number: stack.enter_context(self._paths[number].open("ab")) if number in self._paths else None
                for number in _NAMES
            }

    @contextlib.contextmanager
    def copying(self) -> Generator[None]:
        """Copy new output while the block runs, and the rest of it at the end."""
        thread = threading.Thread(target=self._copy_until_over, name="safepoint-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _copy_until_over(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        for number, path in self._paths.items():
            # If nothing reads the output of this process any more, the files still have it.
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                file.seek(self._offsets[number])
                while data := file.read(_BLOCK_BYTES):
                    self._offsets[number] += len(data)
                    while data:
                        data = data[os.write(number, data) :]


def is_file(number: int) -> bool:
    """Whether a descriptor of this process is a file or `/dev/null`, which a restored process can use as before."""
    try:
        status = os.fstat(number)
    except OSError:
        return False
    is_null = stat.S_ISCHR(status.st_mode) and os.path.samestat(status, os.stat(os.devnull))
    return stat.S_ISREG(status.st_mode) or is_null


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
