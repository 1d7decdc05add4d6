"""Signals of one rank: flags that the training loop reads, and a watch thread that acts when the loop cannot.

- A handler only sets a flag, and calls the handler that was installed before.
- In the training loop, a second SIGINT ends the process at once.
- Outside the training loop, SIGTERM ends the process. If the newest checkpoint is not uploaded yet, the process first
  waits for this upload.
- Inside the loop, the watch thread ends the process at the deadline, even if the loop hangs. A process that was
  frozen before the deadline, and is restored after it, has no deadline.

How the ranks agree to stop is in `safepoint.training.collective.vote`.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

from safepoint.errors import ExitCode
from safepoint.foundation import clock

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_NEVER_S = float("inf")
_Handler = Callable[[int, FrameType | None], object] | int | None


class Termination:
    """The signals of this process.

    Args:
        within_s: seconds from a stop request until the process must have ended.
        original: maps a signal of this process to the signal that the launcher received. At Ctrl-C, the launcher
            sends SIGTERM to its ranks; `original(SIGTERM)` is then SIGINT.
        reserved: called at a stop request; returns how many seconds of `within_s` are reserved for a process image.
            This process has to finish its work before the reserved seconds begin, but it does not end before the
            deadline.
        was_frozen: whether this process is, or was, frozen after the stop request. If so, it has no deadline any
            more.
    """

    def __init__(
        self,
        *,
        within_s: float,
        original: Callable[[int], int] = lambda number: number,
        reserved: Callable[[], float] = lambda: 0.0,
        was_frozen: Callable[[], bool] = lambda: False,
    ) -> None:
        self._within_s = within_s
        self._original = original
        self._reserved = reserved
        self._reserved_s = 0.0
        self._was_frozen = was_frozen
        self._is_unlimited = False
        self._on_signal: Callable[[int], object] = lambda _: None
        self._on_stop_outside_training: Callable[[], object] = lambda: None
        self._on_deadline: Callable[[], object] = lambda: None
        self._check_step: Callable[[], float | None] = lambda: None
        self._check_at_s = _NEVER_S
        self._previous: dict[int, _Handler] = {}
        self._chained: dict[int, _Handler] = {}
        self._in_training = False
        self._num_interrupts = 0
        self._deadline_s = _NEVER_S
        self._is_save_requested = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.stop_signal = 0
        """The stop signal that this process or its launcher has received, or 0."""

    def install(
        self,
        *,
        on_signal: Callable[[int], object],
        on_stop_outside_training: Callable[[], object],
        on_deadline: Callable[[], object],
    ) -> None:
        """Handle SIGTERM, SIGINT and SIGUSR1, and start the watch thread, which calls the three functions.

        Call this method on the main thread.

        Args:
            on_signal: called with each signal, before the watch thread reacts to it; must return soon.
            on_stop_outside_training: ends the process, because SIGTERM arrived outside the training loop. If the
                function returns, the process may run until the deadline.
            on_deadline: ends the process, because the deadline has passed inside the training loop.
        """
        self._on_signal = on_signal
        self._on_stop_outside_training = on_stop_outside_training
        self._on_deadline = on_deadline
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        # The interpreter writes the signal's number to this pipe even while the main thread is stuck in C code.
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._reset_in_child)
        threading.Thread(target=self._watch, name="safepoint-termination", daemon=True).start()

    def enter_training(self, check_step: Callable[[], float | None]) -> None:
        """Record that the training loop has begun. From now on, the loop reacts to stop requests.

        This class's handlers replace the handlers that the script has installed, and call them.

        Args:
            check_step: called on the watch thread after a stop request. If the running step cannot be finished in
                time, the function may request a save of an earlier snapshot. The keeper (the process that writes
                snapshots to disk) saves the snapshot and then ends this process. The function returns the seconds
                until the next call, or None if only a further signal requires a call.
        """
        for number in _SIGNALS:
            current = signal.getsignal(number)
            if current != self._handle:
                self._chained[number] = current
                signal.signal(number, self._handle)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._check_step = check_step
        self._in_training = True

    def reinstall_handlers(self) -> None:
        """Replace the handlers that a framework has installed since the training began."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def leave_training(self) -> None:
        """Record that the training loop has ended, and restore the handlers of the script."""
        self._in_training = False
        self._check_at_s = _NEVER_S
        for number, handler in self._chained.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._chained.clear()

    def begin_stop(self) -> None:
        """Set the deadline, unless it is set. Called when this rank or another rank has received a stop request."""
        if self._deadline_s == _NEVER_S and not self._is_unlimited:
            self._reserved_s = min(self._reserved(), self._within_s)
            self._deadline_s = clock.monotonic_s() + self._within_s
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_writer, b"\0")

    def request_stop(self) -> None:
        """Stop the run as SIGTERM does: at the next vote of the ranks."""
        self.stop_signal = signal.SIGTERM

    def request_save(self) -> None:
        """Request a checkpoint, as SIGUSR1 does."""
        self._is_save_requested = True

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        is_requested, self._is_save_requested = self._is_save_requested, False
        return is_requested

    @property
    def available_s(self) -> float:
        """Seconds left for the work of this process; infinite before a stop request."""
        left_s = self._deadline_s - self._reserved_s - clock.monotonic_s()
        return _NEVER_S if left_s <= 0 and self._has_no_deadline() else left_s

    def _has_no_deadline(self) -> bool:
        """Whether there is no deadline any more. Threads call this before they act on a deadline that has passed."""
        if not self._is_unlimited and self._was_frozen():
            self._deadline_s, self._is_unlimited = _NEVER_S, True
        return self._is_unlimited

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.request_save()
        elif number == signal.SIGINT:
            self._interrupt(frame)
        else:
            self.stop_signal = self.stop_signal or self._original(number)
        chained = self._chained.get(number, self._previous.get(number))
        if callable(chained) and chained is not signal.default_int_handler:
            chained(number, frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        if not self._in_training:
            signal.default_int_handler(signal.SIGINT, frame)
        self._num_interrupts += 1
        if self._num_interrupts > 1:
            os._exit(ExitCode.SIGINT)
        self.stop_signal = self.stop_signal or signal.SIGINT

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._wake_reader], [], [], self._wait_s())
            numbers: bytes = os.read(self._wake_reader, 64) if ready else b""
            for number in dict.fromkeys(numbers):
                if number in _SIGNALS:
                    self._on_signal(number)
            if signal.SIGTERM in numbers or (self._in_training and signal.SIGINT in numbers):
                self._answer(signal.SIGTERM if signal.SIGTERM in numbers else signal.SIGINT)
            if clock.monotonic_s() >= self._deadline_s and not self._has_no_deadline():
                self._on_deadline()
            is_check_due = ready or clock.monotonic_s() >= self._check_at_s
            if self._in_training and self._deadline_s < _NEVER_S and is_check_due:
                again_s = self._check_step()
                self._check_at_s = _NEVER_S if again_s is None else clock.monotonic_s() + again_s

    def _wait_s(self) -> float | None:
        until_s = min(self._deadline_s, self._check_at_s if self._in_training else _NEVER_S)
        return None if until_s == _NEVER_S else max(0.0, until_s - clock.monotonic_s())

    def _answer(self, number: int) -> None:
        if self._in_training:
            # This thread reacts to the signal, because the main thread may be inside a long C call, during which no
            # Python handler runs.
            self.stop_signal = self.stop_signal or self._original(number)
            self.begin_stop()
        elif number == signal.SIGTERM and signal.getsignal(number) == self._handle:
            self._on_stop_outside_training()
            self.begin_stop()

    def _reset_in_child(self) -> None:
        # A child, such as a data loader's worker, must end at SIGTERM. Only its parent, the rank, saves.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            # Ctrl-C reaches the whole process group; the rank needs its workers until it has saved.
            signal.signal(signal.SIGINT, signal.SIG_IGN if self._in_training else signal.default_int_handler)
