"""Reads the output of a job's processes: a file for each rank and each launcher."""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from safepoint.errors import StorageError
from safepoint.foundation import clock
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.jobs.model.job_place import LogLine

FOLDER = "logs"
_POLL_S = 0.1
_INITIALIZER = "initializer"
_MOST_LINE_BYTES = 1 << 20
"""Longer lines are split, because a progress bar may write for days without the end of a line."""


@dataclass(slots=True)
class _Tail:
    path: Path
    offset: int = 0
    rest: bytes = field(default=b"")

    @property
    def source(self) -> str:
        return self.path.stem.replace("-", " ")

    def skip_to_last(self, last_bytes: int) -> None:
        """Begin with the first line that begins in the last `last_bytes` bytes."""
        with contextlib.suppress(FileNotFoundError), _opened(self.path) as stream:
            self.offset = max(0, stream.seek(0, os.SEEK_END) - last_bytes)
            if self.offset:
                stream.seek(self.offset - 1)
                self.offset += len(stream.readline()) - 1

    def lines(self) -> Iterator[LogLine]:
        """New complete lines; none if the job was deleted. A line that is too long is split into several."""
        with contextlib.suppress(FileNotFoundError), _opened(self.path) as stream:
            stream.seek(self.offset)
            for chunk in iter(lambda: stream.read(1 << 20), b""):
                self.offset += len(chunk)
                *whole, self.rest = (self.rest + chunk).split(b"\n")
                yield from (self._line(line) for line in whole)
                if len(self.rest) > _MOST_LINE_BYTES:
                    yield self._line(self.rest)
                    self.rest = b""

    def last(self) -> Iterator[LogLine]:
        """The last line, if it is incomplete."""
        if self.rest:
            yield self._line(self.rest)
            self.rest = b""

    def _line(self, line: bytes) -> LogLine:
        return LogLine(source=self.source, text=line.decode(errors="replace").rstrip("\r"))


@contextlib.contextmanager
def _opened(path: Path) -> Generator[BinaryIO]:
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(
            f"the output {path} cannot be read: {error.strerror or error}; nothing more was read",
            hint="see what is at this path: the job may have replaced the file",
        ) from error
    with stream:
        yield stream


def read_logs(
    folder: Path,
    *,
    ranks: range | None = None,
    nodes: range | None = None,
    step: str | None = None,
    is_over: Callable[[], bool] | None = None,
    last_bytes: int | None = None,
) -> Iterator[LogLine]:
    """The lines of a job's output.

    Args:
        folder: the folder of the job.
        ranks: the ranks whose output is read; None for all.
        nodes: the nodes whose launchers' output is read; None for all.
        step: the name of a step that runs before the launchers start, such as `dataset-initializer`. Only the output
            of this step is read. If `step` is None, and `ranks` or `nodes` is given, the only step whose output is
            read is the installation of packages.
        is_over: if given, new lines are read until this function returns True. If not, only existing lines are read.
        last_bytes: begin with the first line that begins in the last `last_bytes` bytes of each file; None for the
            beginning of the file.

    Raises:
        StorageError: an output cannot be read, or is a link or a pipe.
    """
    tails: dict[Path, _Tail] = {}
    while True:
        over = is_over is None or is_over()  # call `is_over` first, so that all lines before the end are read below
        for path in sorted((folder / FOLDER).glob("*.log"), key=_order):
            if path not in tails and _is_selected(path, ranks, nodes, step):
                tails[path] = _Tail(path)
                if last_bytes is not None:
                    tails[path].skip_to_last(last_bytes)
        for tail in tails.values():
            yield from tail.lines()
        if over:
            for tail in tails.values():
                yield from tail.last()
            return
        clock.sleep(_POLL_S)


def _is_selected(path: Path, ranks: range | None, nodes: range | None, step: str | None) -> bool:
    what, _, number = path.stem.partition("-")
    if step is not None or (number == _INITIALIZER and (ranks, nodes) != (None, None)):
        return path.stem == step
    wanted = {"rank": ranks, "node": nodes}.get(what)
    return wanted is None or (number.isdecimal() and int(number) in wanted)


def _order(path: Path) -> tuple[str, int]:
    what, _, number = path.stem.partition("-")
    # Ranks come last, so that the last line or the error of a training is at the end.
    order = {"packages": "a", "dataset": "b", "model": "b", "node": "c"}
    return (order.get(what, "d"), int(number) if number.isdecimal() else 0)
