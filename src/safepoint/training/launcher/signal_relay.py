"""Forwards the launcher's signals to its ranks, and kills ranks that still run near the end of the grace period."""

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from safepoint.errors import ExitCode
from safepoint.foundation import clock
from safepoint.foundation.processes import ProcessId, identify
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launcher_reporter import LauncherReporter
from safepoint.training.outcome.launcher_folder import forwarded_mark, note_stop_signal, was_frozen
from safepoint.training.outcome.verdict import exit_code_of

_log = logging.getLogger("safepoint")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MOST_REPORT_S = 5.0


class SignalRelay:
    """Handles the launcher's signals on a separate thread.

    The main thread may be inside torch's rendezvous, in which no Python handler runs.

    Args:
        settings: the grace period and its margin.
        folder: the launcher's folder. This folder is removed when a signal ends the process.
        is_alone: whether this is the only node of the job.
        reporter: reports signals, and the end of the process when a signal ends it.
        on_exit: receives the exit code before a signal ends the process.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: Path,
        *,
        is_alone: bool,
        reporter: LauncherReporter,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        # Ranks should end before the margin begins. Ranks that still run when half of the margin is left are killed.
        self._kill_after_s = settings.grace_s - settings.margin_s / 2
        self._margin_s = settings.margin_s
        self._reporter = reporter
        self._folder = folder
        self._is_alone = is_alone
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._ranks: tuple[ProcessId, ...] = ()
        self._own = identify(os.getpid())
        self._num_interrupts = 0
        self._deadline_s: float | None = None
        self._have_ranks_ended = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.signal = 0
        """The signal that stops this node, or 0."""
        self.killed = False
        """Whether ranks had to be killed."""

    def install(self) -> None:
        """Handle SIGTERM, SIGINT, SIGHUP and SIGUSR1 from now on. Call this method on the main thread."""
        for number in (*_STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, _handled_by_thread)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._serve, name="safepoint-signals", daemon=True).start()

    def set_ranks(self, pids: Sequence[int]) -> None:
        """Set the processes of the ranks; none while the ranks restart. If a stop was requested, signal them now."""
        with self._lock:
            self._ranks = _identified(pids)
            self._own = identify(os.getpid())
            if self.signal:
                self._send(signal.SIGTERM)

    def ranks_ended(self) -> tuple[int, bool]:
        """Record that the ranks have ended.

        From then on the launcher only waits for the keeper, the process that writes snapshots to disk. A later stop
        signal limits this wait.

        Returns:
            The signal that stopped the ranks, or 0, and whether they had to be killed.
        """
        with self._lock:
            self._ranks = ()
            self._have_ranks_ended = True
            return self.signal, self.killed

    @property
    def remaining_s(self) -> float | None:
        """Seconds until ranks that still run are killed; None before a stop request."""
        if self.killed:
            return 0.0
        return None if self._deadline_s is None else max(0.0, self._deadline_s - clock.monotonic_s())

    @property
    def report_limit_s(self) -> float:
        """The most seconds for the report of the end: 5 s, or less if less time is left after a stop request."""
        remaining_s = self.remaining_s
        return _MOST_REPORT_S if remaining_s is None else max(0.25 * self._margin_s, min(remaining_s, _MOST_REPORT_S))

    def request(self, number: int) -> None:
        """Send SIGTERM to this node's ranks, so that they vote, save and end. Only the first call has an effect.

        Args:
            number: the signal that the launcher received, or SIGTERM if another node requests the stop.
        """
        with self._lock:
            if self.signal:
                return
            self.signal = number
            self._deadline_s = clock.monotonic_s() + self._kill_after_s
            note_stop_signal(self._folder, number)
            self._send(signal.SIGTERM)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")  # wakes the thread, which has a deadline now

    def _serve(self) -> None:
        while True:
            wait_s = None if self._deadline_s is None else max(0.0, self._deadline_s - clock.monotonic_s())
            ready, _, _ = select.select([self._reader], [], [], wait_s)
            for number in os.read(self._reader, 64) if ready else b"":
                self._answer(number)
            if self._deadline_s is not None and clock.monotonic_s() >= self._deadline_s:
                if not was_frozen(self._folder):  # ranks that were restored from a process image may run on
                    self._kill()
                self._deadline_s = None

    def _answer(self, number: int) -> None:
        if number == signal.SIGUSR1:
            with self._lock:
                self._send(signal.SIGUSR1)
            self._reporter.signal_received(number)
        elif number in _STOP_SIGNALS:
            if number == signal.SIGINT:
                self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._kill()
                self._reporter.signal_received(number)
                self._exit(ExitCode.SIGINT, "stopped at once by a second SIGINT, without a save")
            if not self._ranks and self._is_alone and not self._have_ranks_ended:
                self._reporter.signal_received(number)
                self._exit(exit_code_of(number), f"stopped by {_name(number)} before the ranks had started")
            # If there are several nodes, the other agents may wait for this node's agent. So this process does not
            # exit before its ranks start: its agent first joins the other agents, and then sends them the stop
            # request.
            self.request(number)
            self._reporter.signal_received(number)

    def _exit(self, code: int, reason: str) -> None:
        _log.warning("%s", reason)
        self._reporter.end(code, reason, limit_s=0.25 * self._margin_s)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._on_exit is not None:
            self._on_exit(code)
        sys.stderr.flush()
        os._exit(code)

    def _kill(self) -> None:
        self.killed = True
        if not self._ranks and not self._have_ranks_ended:
            self._exit(exit_code_of(self.signal), f"stopped by {_name(self.signal)} before the ranks had started")
        self.kill_ranks()

    def kill_ranks(self) -> None:
        """Kill the ranks, and the processes that they started."""
        for rank in self._current_ranks():  # each rank leads a process group, with its data loaders' workers
            rank.send_to_group(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            (self._folder / forwarded_mark(signal.Signals(number).name)).touch()
        for rank in self._current_ranks():  # `send` does not signal a new process with the pid of an ended rank
            rank.send(number)

    def _current_ranks(self) -> tuple[ProcessId, ...]:
        """The ranks. A restore from a process image keeps their process ids, but changes their start times."""
        own = identify(os.getpid())
        if own != self._own:
            self._own, self._ranks = own, _identified([rank.pid for rank in self._ranks])
        return self._ranks


def _identified(pids: Iterable[int]) -> tuple[ProcessId, ...]:
    return tuple(rank for pid in pids if (rank := identify(pid)) is not None)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _handled_by_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread of the relay reacts to the signal.

    A handler must exist all the same: the interpreter writes the number of a signal to the wake-up pipe only if the
    signal has a handler in Python.
    """
