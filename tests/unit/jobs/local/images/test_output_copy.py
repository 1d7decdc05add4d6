"""Tests of safepoint.jobs.local.images.output_copy."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.jobs.local.images.output_copy import OutputCopy, is_file
from tests.support.patience import PATIENCE


@contextlib.contextmanager
def printing() -> Iterator[int]:
    """The output of this process is a pipe, whose reading end this yields. The error output is /dev/null."""
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    kept = {number: os.dup(number) for number in (1, 2)}
    os.dup2(writer, 1)
    os.dup2(null, 2)
    try:
        yield reader
    finally:
        for number, descriptor in kept.items():
            os.dup2(descriptor, number)
        for descriptor in (*kept.values(), null, reader, writer):
            os.close(descriptor)


def test_a_pipe_gets_what_processes_write_to_the_file(tmp_path: Path) -> None:
    """/dev/null is used as it is."""
    (tmp_path / "output.log").write_text("of an earlier run\n")
    with printing() as reader:
        assert (is_file(1), is_file(2)) == (False, True)
        copy = OutputCopy(tmp_path)
        with copy.copying(), copy.opened() as files:
            assert files[2] is None
            assert files[1] is not None
            files[1].write(b"one\ntwo\n")
        assert os.read(reader, 1000) == b"one\ntwo\n"
    assert (tmp_path / "output.log").read_text() == "one\ntwo\n"


def test_restored_processes_go_on_with_their_file(tmp_path: Path) -> None:
    """What was copied before the freeze is not copied once more."""
    (tmp_path / "output.log").write_text("before\n")
    with printing() as reader:
        with OutputCopy(tmp_path).copying(), (tmp_path / "output.log").open("a") as file:
            file.write("after\n")
        assert os.read(reader, 1000) == b"after\n"


def test_nothing_reads_the_output_any_more(tmp_path: Path) -> None:
    """The files keep the output, and the run goes on."""
    with printing():
        copy = OutputCopy(tmp_path)
        with copy.copying(), copy.opened() as files, open(os.devnull, "rb") as unwritable:
            os.dup2(unwritable.fileno(), 1)
            assert files[1] is not None
            files[1].write(b"kept")
    assert (tmp_path / "output.log").read_bytes() == b"kept"


def test_a_command_copies_what_a_killed_one_has_not_copied(tmp_path: Path) -> None:
    """Each line once: of processes that are restored, and of processes that are started again."""
    with printing() as reader:
        copy = OutputCopy(tmp_path)
        with copy.copying(), copy.opened() as files:
            assert files[1] is not None
            files[1].write(b"one\n")
        with (tmp_path / "output.log").open("a") as file:  # the command is killed, and its processes write on
            file.write("two\n")
        with OutputCopy(tmp_path).copying(), (tmp_path / "output.log").open("a") as file:
            file.write("three\n")
        with (tmp_path / "output.log").open("a") as file:
            file.write("four\n")
        copy = OutputCopy(tmp_path)
        with copy.copying(), copy.opened() as files:
            assert files[1] is not None
            files[1].write(b"five\n")
        assert os.read(reader, 1000) == b"one\ntwo\nthree\nfour\nfive\n"
    assert (tmp_path / "output.log").read_text() == "five\n"


@pytest.mark.parametrize("record", ["", "x", "-1", "9" * 30, None])
def test_a_record_that_is_not_valid(record: str | None, tmp_path: Path) -> None:
    """Nothing is copied twice."""
    (tmp_path / "output.log").write_text("before\n")
    if record is not None:
        (tmp_path / "output.log.copied").write_text(record)
    with printing() as reader:
        with OutputCopy(tmp_path).copying(), (tmp_path / "output.log").open("a") as file:
            file.write("after\n")
        assert os.read(reader, 1000) == b"after\n"


def test_processes_that_are_started_again_while_output_is_copied(tmp_path: Path) -> None:
    """As after a restore without progress. All lines of all starts are there, once and in order."""
    num_starts, num_lines = 20, 200
    expected = b"".join(b"%d %d\n" % (start, line) for start in range(num_starts) for line in range(num_lines))
    with printing() as reader:
        found: list[bytes] = []

        def read() -> None:
            while sum(map(len, found)) < len(expected):
                found.append(os.read(reader, 1 << 16))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        copy = OutputCopy(tmp_path)
        with copy.copying():
            for start in range(num_starts):
                with copy.opened() as files:
                    assert files[1] is not None
                    for line in range(num_lines):
                        files[1].write(b"%d %d\n" % (start, line))
                        files[1].flush()
        thread.join(30 * PATIENCE)
        assert b"".join(found) == expected
