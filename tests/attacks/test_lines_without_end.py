"""Jobs that print long lines, or no end of a line, faster than they are read. Their readers do not keep all of it."""

import contextlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.dashboard.pages import job as page
from safepoint.jobs.cluster.watches.log_streams import LogStreams, Start
from safepoint.jobs.local.attempt.logs import read_logs
from safepoint.jobs.model.job_place import LogLine

_MIB = 1 << 20
_MOST_BYTES = 512 * _MIB


def test_the_output_of_a_pod_that_is_followed() -> None:
    """While nothing is shown, at most some hundred MiB wait."""
    line, has_read = f"2026-11-26T12:00:00Z {'x' * _MIB}", threading.Event()

    class Api:
        def log(self, *_: object, **__: object) -> Iterator[str]:
            for number in range(_MOST_BYTES // _MIB + 2):
                if number > _MOST_BYTES // _MIB:
                    has_read.set()
                yield line

    streams: Any = LogStreams(Api())  # pyright: ignore[reportArgumentType]
    pod = {"metadata": {"name": "a-node-0-0-abcde", "uid": "1"}}
    streams.begin(pod, Start("1", 0))
    try:
        while not streams._arrived.full() and not has_read.is_set():
            threading.Event().wait(0.01)
        assert not has_read.is_set()
        assert streams._arrived.qsize() * _MIB <= _MOST_BYTES
    finally:
        streams.close()


def test_the_output_on_a_page() -> None:
    """Of each line, only the part that the page shows is kept."""

    class Reader:
        def job(self, name: str) -> None:
            pass

        @contextlib.contextmanager
        def open_jobs(self, actor: str) -> Iterator[Any]:
            yield self

        def logs(self, name: str, **_: object) -> Iterator[LogLine]:
            return (LogLine(source="node 0", text=str(number) + "x" * _MIB) for number in range(64))

    tail: Callable[..., tuple[list[LogLine], bool]] = getattr(page, "_tail")  # noqa: B009  private
    tracemalloc.start()
    try:
        lines, _ = tail(Reader(), "a", None, None, "", 2000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(lines) == 64
    assert peak_bytes < 16 * _MIB


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_bar_that_never_ends_its_line(is_followed: bool, tmp_path: Path) -> None:
    """The line comes in parts, and nothing is missing."""
    (tmp_path / "logs").mkdir()
    text = b"".join(b"\r%d%%|####|" % number for number in range(1_000_000))
    (tmp_path / "logs" / "rank-0.log").write_bytes(text)
    lines = list(read_logs(tmp_path, is_over=(lambda: True) if is_followed else None))
    assert "".join(line.text for line in lines).encode() == text
    assert max(len(line.text) for line in lines) <= 3 * _MIB
