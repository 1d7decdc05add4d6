"""Turns SIGTERM and Ctrl-C into an exception, so that a command undoes what it has begun before its process ends."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

from safepoint.errors import SafepointError, error_line

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal has interrupted the command. This class does not inherit from KeyboardInterrupt, because Typer catches
    KeyboardInterrupt.

    Args:
        number: the signal.
        effect: what the command has undone, for a person.
    """

    def __init__(self, number: int, effect: str) -> None:
        super().__init__(number, effect)
        self.number, self.effect = signal.Signals(number), effect

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process that this signal has ended: 130 or 143."""
        return 128 + self.number


@contextlib.contextmanager
def undoing(effect: str, *, left: str | None = None, as_json: bool = False) -> Generator[None]:
    """In this block, the first SIGTERM or SIGINT raises `Interrupted`.

    Later signals are ignored, so that they do not interrupt the cleanup: processes must not stay frozen, for example.
    If the cleanup may take long, and another command can complete it, pass `left`: then the second signal ends the
    process at once. The rest of the cleanup, such as the release of a claim on what is left, must not run: the other
    command would not find what is left.

    A signal that this process ignores stays ignored. On another thread than the main one, signals are left as they
    are.

    Args:
        effect: what the block has undone when the exception leaves it.
        left: what stays if a second signal ends the process, and how it is removed; None to ignore this signal.
        as_json: whether the message about the second signal is for a program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    was_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if not was_interrupted:
            was_interrupted = True
            raise Interrupted(number, effect)
        if left is not None:
            again = Interrupted(number, left)
            error = SafepointError(f"interrupted again by {again.number.name}: {left}")
            # Not `sys.stderr`: the signal may have interrupted a write to it.
            with contextlib.suppress(OSError):
                os.write(2, error_line(again.exit_code, error, as_json=as_json).encode())
            os._exit(again.exit_code)

    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
