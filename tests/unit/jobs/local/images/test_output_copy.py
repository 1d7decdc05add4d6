"""Tests of safepoint.jobs.local.images.output_copy."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.jobs.local.images.output_copy import OutputCopy, is_file


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> Iterator[int]:
    """The reading end of a pipe that is the output of this process. The error output is a file."""
    reader, writer = os.pipe()
    kept = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(reader)


def test_a_pipe_gets_what_processes_write_to_the_file(printed: int, tmp_path: Path) -> None:
    """A file and /dev/null are used as they are."""
    assert not is_file(1)
    assert is_file(2)
    (tmp_path / "output.log").write_text("of an earlier run\n")
    copy = OutputCopy(tmp_path)
    with copy.copying(), copy.opened() as files:
        assert files[2] is None
        assert files[1] is not None
        files[1].write(b"one\ntwo\n")
    assert os.read(printed, 1000) == b"one\ntwo\n"
    assert (tmp_path / "output.log").read_text() == "one\ntwo\n"


def test_restored_processes_go_on_with_their_file(printed: int, tmp_path: Path) -> None:
    """What was copied before the freeze is not copied once more."""
    (tmp_path / "output.log").write_text("before\n")
    with OutputCopy(tmp_path).copying(), (tmp_path / "output.log").open("a") as file:
        file.write("after\n")
    assert os.read(printed, 1000) == b"after\n"


def test_nothing_reads_the_output_any_more(printed: int, tmp_path: Path) -> None:
    """The files keep the output, and the run goes on."""
    copy = OutputCopy(tmp_path)
    null = os.open(os.devnull, os.O_RDONLY)
    with copy.copying(), copy.opened() as files:
        os.dup2(null, 1)  # a write fails
        assert files[1] is not None
        files[1].write(b"kept")
    os.close(null)
    assert (tmp_path / "output.log").read_bytes() == b"kept"
