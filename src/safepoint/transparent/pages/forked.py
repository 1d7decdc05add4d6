"""Divides work among child processes that share the memory of this process as it was when they began.

Threads do not help with pages: each call that releases Python's global lock takes only 0.1 ms. Two threads on two
processors took longer than one thread, and up to 2.9 times its processor time.

Promises: if this process ends, even if it is killed, the kernel ends the child processes. No child process is left
when the `with` block ends. No child process runs a handler of a signal of this process.
"""

import contextlib
import ctypes
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import NoReturn

from safepoint.errors import ImageError, StorageError

_PR_SET_PDEATHSIG = 1
_STEP, _ERROR = b".", b"!"
_MOST_TEXT = 1000
"""The limit of the characters of an error's message that a child process reports. A pipe takes a report of this
length at once."""


@contextlib.contextmanager
def forked(num_processes: int, work: Callable[[int], Iterable[object]]) -> Generator[Callable[[int], None]]:
    """Start child processes. Child process k iterates over `work(k)`.

    Yields:
        A function that waits until child process k has made one more step of its iteration.

    Raises:
        ImageError, OSError: a child process raised this error.
        StorageError: a child process was ended.
    """
    pids: list[int] = []
    pipes: list[int] = []

    def wait(number: int) -> None:
        mark = os.read(pipes[number], 1)
        if mark != _STEP:
            _raise_error_of(pipes[number] if mark else None)

    try:
        for number in range(num_processes):
            reading, writing = os.pipe()
            pipes.append(reading)
            try:
                # A handler that raises an exception must not run between the fork and the append: it would leave a
                # child process.
                with _blocked_signals() as before:
                    pids.append(_fork(lambda pipe=writing, number=number: _steps(work(number), pipe), before))
            finally:
                os.close(writing)
        yield wait
    finally:
        for pipe in pipes:
            os.close(pipe)
        for pid in pids:  # After an error they still work; otherwise they have ended.
            # If this process ignores SIGCHLD, the kernel forgets a child process as soon as it has ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@contextlib.contextmanager
def _blocked_signals() -> Generator[set[int]]:
    """Block all signals of this thread while the block runs. Yields the signals that were blocked before."""
    before: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(work: Callable[[], None], blocked: set[int]) -> int:
    """Run the work in a child process. The caller has blocked all signals; `blocked` were blocked before."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns if this process has other threads, because they may hold locks. `work` takes no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run(work, parent, blocked)
    return pid


def _run(work: Callable[[], None], parent: int, blocked: set[int]) -> NoReturn:
    """Run the work in the child process, which never returns to the code that was running."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        _leave_signals_to_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if os.getppid() == parent:
            work()
            code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _leave_signals_to_parent() -> None:
    """Ignore the signals that the parent process handles: they may reach the whole process group, as Ctrl-C does, and
    the parent process decides whether the child processes end. SIGTERM ends this process.

    The parent's handlers must not run here: one that undoes a command would undo it while the parent still works.
    """
    signal.set_wakeup_fd(-1)  # the descriptor would wake up the parent
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _steps(steps: Iterable[object], pipe: int) -> None:
    try:
        for _ in steps:
            os.write(pipe, _STEP)
    except ImageError as error:
        _report(pipe, {"message": error.message, "hint": error.hint})
    except OSError as error:
        _report(pipe, {"errno": error.errno, "message": error.strerror, "filename": error.filename})


def _report(pipe: int, error: dict[str, object]) -> None:
    short = {key: text[:_MOST_TEXT] if isinstance(text, str) else text for key, text in error.items()}
    os.write(pipe, _ERROR + json.dumps(short).encode())


def _raise_error_of(pipe: int | None) -> NoReturn:
    """Raise the error that a child process has reported; if `pipe` is None, the child process has ended without a
    report."""
    if pipe is None:
        raise StorageError(
            "a process that read the image was ended; nothing was restored", hint="free some memory, and try again"
        )
    pieces: list[bytes] = []
    while piece := os.read(pipe, 1 << 16):
        pieces.append(piece)
    error = json.loads(b"".join(pieces))
    if "errno" in error:
        raise OSError(error["errno"], error["message"], error["filename"])
    raise ImageError(error["message"], hint=error["hint"])
