"""The file of progress: rewritten by a thread of its own, and complete when somebody waits for it."""

import threading
from pathlib import Path

from safepoint.progress.file_writer import ProgressFile


def test_the_last_news_are_written_without_anybody_waiting(tmp_path: Path) -> None:
    """Also those that came while the writer rested: a long pause may follow."""
    news = 0
    rewritten = threading.Event()
    path = tmp_path / "progress.json"

    def make() -> bytes:
        if news == 100:
            rewritten.set()
        return str(news).encode()

    file = ProgressFile([path], make)
    for number in range(1, 101):
        news = number
        file.update()
    assert rewritten.wait(10)
    assert file.flush(10)
    assert path.read_text() == "100"
    file.close()


def test_a_flush_writes_the_news_of_its_moment_everywhere(tmp_path: Path) -> None:
    """At once, into every folder that exists; a missing one does not affect the others."""
    news = [0]
    paths = [tmp_path / "a.json", tmp_path / "missing" / "b.json", tmp_path / "c.json"]
    file = ProgressFile(paths, lambda: str(news[0]).encode())
    for number in range(1, 6):
        news[0] = number
        assert file.flush(10)
        assert [path.read_text() for path in (paths[0], paths[2])] == [str(number)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "c.json"]
    file.close()


def test_it_writes_twice_a_second_at_most(tmp_path: Path) -> None:
    """However often there are news."""
    made: list[int] = []
    file = ProgressFile([tmp_path / "progress.json"], lambda: (made.append(1), b"x")[1])
    assert file.flush(10)
    for _ in range(10_000):
        file.update()
    assert len(made) <= 2
    file.close()


def test_a_folder_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """A caller that reports a change continues, and one that waits gives up in time."""
    hangs, released = threading.Event(), threading.Event()

    def make() -> bytes:
        hangs.set()
        released.wait(60)
        return b"x"

    file = ProgressFile([tmp_path / "progress.json"], make)
    file.update()
    assert hangs.wait(10)
    file.update()
    assert not file.flush(0.05)
    released.set()
    assert file.flush(10)
    file.close()
