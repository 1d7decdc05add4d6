"""Lets processes that may be frozen write to files, and copies their output to that of this process.

A frozen process keeps its files, but not a pipe or a terminal of another process. In a pod, the output is a pipe.

Promises: each line is copied once, also if the processes are restored by a later command, and if a command is killed:
the next one copies what is left. If a command is killed while it copies a block, this block may be copied twice.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from safepoint.foundation.files import write_atomic

_NAMES = {1: "output.log", 2: "errors.log"}
"""The files, by the descriptor of this process to which they are copied."""
_LOOK_S = 0.1
_BLOCK_BYTES = 1 << 16


class OutputCopy:
    """The output and the error output of processes.

    Args:
        folder: where the files are made. What an earlier command has copied of them is not copied once more.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = {number: folder / name for number, name in _NAMES.items() if not is_file(number)}
        self._offsets = {number: _copied_of(path) for number, path in self._paths.items()}
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(self) -> Generator[dict[int, BinaryIO | None]]:
        """New files for processes that are started, by descriptor; None where an output of this process is a file.

        What is left of the output of earlier processes is copied first.
        """
        with self._lock:
            self._copy()
            for number, path in self._paths.items():
                path.unlink(missing_ok=True)
                self._note(number, 0)
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
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_S)
            with self._lock:
                self._copy()

    def _copy(self) -> None:
        for number, path in self._paths.items():
            # If nothing reads the output of this process any more, the files still have it.
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                file.seek(self._offsets[number])
                while data := file.read(_BLOCK_BYTES):
                    self._note(number, self._offsets[number] + os.write(number, data))
                    file.seek(self._offsets[number])

    def _note(self, number: int, offset: int) -> None:
        self._offsets[number] = offset
        with contextlib.suppress(OSError):
            write_atomic(_record_of(self._paths[number]), b"%d" % offset, durable=False)


def is_file(number: int) -> bool:
    """Whether a descriptor of this process is a file or `/dev/null`, which a restored process can use as before."""
    try:
        status = os.fstat(number)
    except OSError:
        return False
    is_null = stat.S_ISCHR(status.st_mode) and os.path.samestat(status, os.stat(os.devnull))
    return stat.S_ISREG(status.st_mode) or is_null


def _record_of(path: Path) -> Path:
    """The file that states how many bytes of an output file were copied."""
    return path.with_name(f"{path.name}.copied")


def _copied_of(path: Path) -> int:
    """How many bytes of an output file an earlier command has copied; all of them if that is not known."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    with contextlib.suppress(OSError, ValueError):
        copied = int(_record_of(path).read_bytes())
        return copied if 0 <= copied <= size else size
    return size
