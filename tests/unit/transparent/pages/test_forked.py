"""Child processes that share the work: their errors arrive, and none of them is left."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.errors import ImageError, StorageError
from safepoint.foundation.processes import tree_of
from safepoint.transparent.pages.forked import forked
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = tree_of(os.getpid())
    yield
    assert set(tree_of(os.getpid())) <= set(before)


def make_steps(wait: Callable[[int], None], number: int, num_steps: int) -> None:
    for _ in range(num_steps):
        wait(number)


def test_each_process_makes_its_own_steps(tmp_path: Path) -> None:
    """A step is done when `wait` returns."""

    def work(number: int) -> Iterator[None]:
        for step in range(3):
            (tmp_path / f"{number}-{step}").write_text(str(os.getpid()))
            yield

    with forked(2, work) as wait:
        for step in range(3):
            for number in range(2):
                wait(number)
                assert (tmp_path / f"{number}-{step}").exists()
    pids = {(tmp_path / name).read_text() for name in os.listdir(tmp_path)}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


def test_a_damaged_image() -> None:
    """The error is raised here with its hint, also if another process still works."""

    def work(number: int) -> Iterator[None]:
        yield
        if number == 0:
            time.sleep(1000)
        raise ImageError("region 3 was altered " + 2000 * "x", hint="use another image")

    with pytest.raises(ImageError, match="region 3 was altered") as caught, forked(2, work) as wait:
        make_steps(wait, 1, 2)
    assert caught.value.hint == "use another image"


def test_a_full_disk() -> None:
    """The number of the error is kept."""

    def work(number: int) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device", f"/pages/{number}")
        yield

    with pytest.raises(OSError, match="No space left") as caught, forked(1, work) as wait:
        wait(0)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/pages/0")


@pytest.mark.parametrize("is_exception", [False, True])
def test_a_process_that_is_ended(is_exception: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """By the kernel, because memory is short; or by an error of the program."""

    def work(_: int) -> Iterator[None]:
        yield
        if is_exception:
            raise ZeroDivisionError("not expected")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(StorageError, match="a process that read the image was ended"), forked(1, work) as wait:
        make_steps(wait, 0, 2)
    assert ("not expected" in capfd.readouterr().err) is is_exception


def test_the_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Also if it is killed."""
    program = (
        "import os, sys, time\nfrom safepoint.transparent.pages.forked import forked\n"
        "def work(number):\n    open(sys.argv[1], 'w').write(str(os.getpid()))\n    yield\n    time.sleep(1000)\n"
        "with forked(1, work) as wait:\n    wait(0)\n    print('begun', flush=True)\n    time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        pid = int((tmp_path / "pid").read_text())
        process.kill()
    deadline_s = time.monotonic() + 10 * PATIENCE
    with contextlib.suppress(FileNotFoundError):
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_program_that_ignores_the_end_of_child_processes() -> None:
    """The kernel then forgets them itself."""
    program = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from safepoint.transparent.pages.forked import forked
with forked(2, lambda number: [None]) as wait:
    wait(0), wait(1)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED)  # until no child process is left
    except ChildProcessError:
        pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30 * PATIENCE)


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGTERM"])
def test_signals_that_arrive_during_the_fork(name: str) -> None:
    """The handlers of the parent run in the parent only, however early a signal reaches the child process.

    All processes of the group receive the signal again and again, except after SIGTERM has ended the child.
    """
    program = f"""
import os, signal
handled, errors = [], []
parent = os.getpid()
def handle(number, frame):
    os.write(1, f"{{os.getpid()}}\\n".encode())
signal.signal(signal.{name}, handle)
os.write(1, b"ready\\n")
from safepoint.errors import StorageError
from safepoint.transparent.pages.forked import forked
for _ in range(30):
    try:
        with forked(2, lambda number: [None]) as wait:
            wait(0), wait(1)
    except StorageError:
        assert "{name}" == "SIGTERM"
signal.signal(signal.{name}, signal.SIG_IGN)
os.write(1, b"end\\n")
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        while process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, getattr(signal, name))
            time.sleep(0.0001)
        reader.join()
    assert lines[-1] == "end\n"
    assert process.returncode == 0
    assert set(lines[:-1]) == {f"{process.pid}\n"}
