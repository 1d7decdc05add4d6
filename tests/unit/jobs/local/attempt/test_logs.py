"""What a job has printed, read while it prints."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.jobs.local.attempt.logs import LogLine, read_logs


class Job:
    """Its files, and whether it is over; what is read goes to `seen` on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        self.is_over = False
        self.seen: list[tuple[str, str]] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)

    def print(self, source: str, text: str | bytes) -> None:
        with (self.folder / "logs" / f"{source}.log").open("ab") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)

    def follow(self) -> None:
        self._thread.start()

    def _follow(self) -> None:
        try:
            for line in read_logs(self.folder, is_over=lambda: self.is_over):
                with self._changed:
                    self.seen.append((line.source, line.text))
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self._error = error

    def wait_for(self, *lines: tuple[str, str]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= len(lines), 30), self.seen
        assert self.seen == list(lines)

    def end(self) -> None:
        self.is_over = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.is_over = True


def read(job: Job, **wanted: range) -> list[tuple[str, str]]:
    return [(line.source, line.text) for line in read_logs(job.folder, **wanted)]


def test_nothing_was_printed(tmp_path: Path, job: Job) -> None:
    """Neither with files nor without their folder."""
    assert read(job) == []
    assert list(read_logs(tmp_path / "elsewhere")) == []


def test_sources_in_order(job: Job) -> None:
    """Packages, launchers, ranks, by number and not by letter; what is no log is left alone."""
    for source in ("rank-10", "rank-2", "node-1", "node-0", "packages"):
        job.print(source, "x\n")
    (job.folder / "logs" / "notes.txt").write_text("y\n")
    assert [source for source, _ in read(job)] == ["packages", "node 0", "node 1", "rank 2", "rank 10"]


def test_ranks_and_nodes_are_chosen_by_number(job: Job) -> None:
    """Each choice for its own kind."""
    for source in ("rank-0", "rank-1", "rank-2", "node-0", "node-1"):
        job.print(source, "x\n")
    assert [source for source, _ in read(job, ranks=range(1, 3), nodes=range(1))] == ["node 0", "rank 1", "rank 2"]
    assert [source for source, _ in read(job, ranks=range(0))] == ["node 0", "node 1"]


def test_lines_are_whole_and_a_last_one_needs_no_end(job: Job) -> None:
    """Empty ones count; the end of a line of another system is one."""
    job.print("rank-0", "one\n\ntwo\r\nthree")
    assert [text for _, text in read(job)] == ["one", "", "two", "three"]


def test_what_is_no_utf8_is_shown_all_the_same(job: Job) -> None:
    """Programs print what they like."""
    job.print("rank-0", b"gr\xfc\xdfe\n\xff\xfe\0\n")
    assert [text for _, text in read(job)] == ["gr��e", "��\0"]


def test_a_character_that_is_cut_between_two_reads_is_whole(job: Job) -> None:
    """Bytes are put together before they become text."""
    job.follow()
    data = "größe\n".encode()
    job.print("rank-0", data[:3])
    job.print("node-0", "there\n")
    job.wait_for(("node 0", "there"))
    job.print("rank-0", data[3:])
    job.wait_for(("node 0", "there"), ("rank 0", "größe"))
    job.end()


def test_followed_files_grow_and_others_appear(job: Job) -> None:
    """A line is shown when it has its end; another rank begins to print later."""
    job.follow()
    job.print("rank-0", "one\ntw")
    job.wait_for(("rank 0", "one"))
    job.print("rank-1", "other\n")
    job.wait_for(("rank 0", "one"), ("rank 1", "other"))
    job.print("rank-0", "o\n")
    job.wait_for(("rank 0", "one"), ("rank 1", "other"), ("rank 0", "two"))
    job.end()


def test_what_was_printed_last_is_shown_before_the_end(job: Job) -> None:
    """The job is over when its processes are: whatever they printed is there by then."""
    asked = threading.Event()

    def is_over() -> bool:
        if asked.is_set():
            job.print("rank-0", "the very last")
            return True
        asked.set()
        return False

    assert list(read_logs(job.folder, is_over=is_over)) == [LogLine(source="rank 0", text="the very last")]


def test_a_job_that_is_deleted_ends_the_reading(job: Job) -> None:
    """Its files go first, its entry in the history a moment later."""
    job.follow()
    job.print("rank-0", "one\n")
    job.wait_for(("rank 0", "one"))
    (job.folder / "logs" / "rank-0.log").unlink()
    job.end()
    assert job.seen == [("rank 0", "one")]


def test_large_logs_come_in_pieces(job: Job) -> None:
    """Lines across the pieces that are read at a time are whole."""
    lines = [f"{number} " + "x" * 1000 for number in range(3000)]
    job.print("rank-0", "\n".join(lines))
    assert [text for _, text in read(job)] == lines


def test_the_end_of_a_long_output_is_read(tmp_path: Path) -> None:
    """From the first line that begins in the last bytes; of a short output, everything."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("".join(f"line {number}\n" for number in range(10)))
    found = {last: [line.text for line in read_logs(tmp_path, last_bytes=last)] for last in (0, 7, 8, 14, 1000)}
    assert found[0] == []
    assert found[7] == found[8] == ["line 9"]
    assert found[14] == ["line 8", "line 9"]
    assert len(found[1000]) == 10
