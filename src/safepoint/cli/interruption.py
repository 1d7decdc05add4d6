"""Turns SIGTERM and Ctrl-C into an exception, so that a command undoes what it has begun before its process ends."""

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

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
def undoing(effect: str) -> Generator[None]:
    """In this block, the first SIGTERM or SIGINT raises `Interrupted`. Later signals are ignored, so that they do not
    interrupt the cleanup.

    A signal that this process ignores stays ignored. On another thread than the main one, signals are left as they
    are.

    Args:
        effect: what the block has undone when the exception leaves it.
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

    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
