"""Starts and supervises the ranks of one node with torch elastic, and tells the truth about how they ended.

torch elastic launches, monitors and restarts. What is added here: a signal to the launcher is passed on to the
ranks at once and the platform's grace period is kept; agents of other nodes hear of it; ranks that Safepoint ended
are not restarted; and the exit code says what happened, which torch elastic's own does not.
"""

import contextlib
import logging
import math
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from safepoint.errors import ExitCode, UsageError
from safepoint.foundation import clock
from safepoint.foundation.environment import current_folder
from safepoint.foundation.events import console
from safepoint.foundation.modules import is_importable
from safepoint.settings.run_settings import STATUS_URL, RunSettings
from safepoint.snapshot.keeper_client.host import KeeperHost
from safepoint.snapshot.memory import block
from safepoint.snapshot.protocol.channel import new_name
from safepoint.snapshot.protocol.plan import KeeperPlan
from safepoint.training.launcher.announcer import Announcer
from safepoint.training.outcome.rank_record import exit_code_after, in_a_sentence, passed_on, read_records
from safepoint.training.outcome.record_folder import record_folder
from safepoint.training.outcome.verdict import exit_code_of, first_failure, reach_verdict

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_WORD_S = 5.0
_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Which ranks to start on this node.

    Args:
        program: script and arguments, or module and arguments.
        is_module: run the program as `python -m` does.
        nproc_per_node: ranks on this node, or `auto`, `cpu`, `gpu` as for torchrun.
        nnodes: number of nodes.
        node_rank: this node's number, from 0.
        master_addr: host of node 0; needed with several nodes.
        master_port: a free port on it.
        max_restarts: starts after a failure of a rank.
    """

    program: tuple[str, ...]
    is_module: bool = False
    nproc_per_node: str = "1"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if not self.program:
            raise UsageError("no script was named", hint="safepoint run [OPTIONS] SCRIPT [ARGS…]")
        if not self.is_module and not Path(self.program[0]).is_file():
            raise UsageError(f"there is no script {self.program[0]}", hint="check the path; it is relative to here")
        if self.is_module and not is_importable(self.program[0], current_folder()):
            raise UsageError(f"there is no module {self.program[0]}", hint="check its name and PYTHONPATH")
        if self.nproc_per_node not in {"auto", "cpu", "gpu"} and not (
            self.nproc_per_node.isdecimal() and int(self.nproc_per_node) > 0
        ):
            raise UsageError(f"--nproc-per-node {self.nproc_per_node!r} must be a positive number or auto")
        if self.nnodes < 1:
            raise UsageError(f"--nnodes {self.nnodes} must be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"--node-rank {self.node_rank} must be at least 0 and below --nnodes {self.nnodes}")
        if self.nnodes > 1 and self.master_addr is None:
            raise UsageError("several nodes need --master-addr", hint="the host name of node 0, the same everywhere")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise UsageError(f"--master-port {self.master_port} must be a port number")
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts} must not be negative")


def launch(plan: LaunchPlan, settings: RunSettings, *, on_exit: Callable[[int], None] | None = None) -> int:
    """Run the ranks of this node to their end.

    Call it on the main thread: it owns the process's signals from here on.

    Args:
        plan: which ranks.
        settings: what they are asked to do.
        on_exit: called with the exit code when a signal ends the process before there is anything to return.

    Returns:
        The exit code for this process: 0, 75, 143, 14, 130, or the failed rank's own. Leave with it at once:
        tearing down an interpreter with torch in it takes longer than a save.
    """
    console.set_up(settings.verbosity)
    job_dir = None if settings.job_dir is None else os.path.abspath(settings.job_dir)
    settings = replace(settings, job_dir=job_dir)
    with record_folder() as records:
        announcer = Announcer(settings, records, node=plan.node_rank, num_nodes=plan.nnodes)
        stop = StopRequest(settings, records, is_alone=plan.nnodes == 1, announcer=announcer, on_exit=on_exit)
        stop.listen()
        announcer.begin()
        keeper = _start_keeper(settings, records)
        name = None if keeper is None else keeper.name
        settings = replace(settings, record_folder=str(records), launcher_pid=os.getpid(), keeper=name)
        _prepare_environment(settings)
        # Importing torch takes seconds; until the ranks are there, a signal simply ends this process.
        from safepoint.training.launcher.agent import run_agent

        try:
            outcome = run_agent(plan, settings, stop, keeper, announcer)
        except BaseException as error:
            reason = in_a_sentence(error)
            announcer.end(exit_code_after(error), reason, limit_s=stop.last_word_s)
            raise
        asked, killed = stop.wind_up()
        if keeper is not None:
            keeper.finish(lambda: stop.left_s)
        rank_records = read_records(records, outcome.restarts)
        verdict = reach_verdict(outcome.exit_codes, rank_records, stop_signal=asked, killed=killed)
        rank = first_failure(outcome.exit_codes, rank_records)
        error = rank_records[rank].message if rank is not None and rank in rank_records else ""
        announcer.end(
            verdict.exit_code,
            verdict.message or error,
            error=error,
            rank=rank,
            is_reported=any(record.exit_code is not None for record in rank_records.values()),
            limit_s=stop.last_word_s,
        )
        if verdict.message:
            used_up = (
                f"; all {plan.max_restarts} restarts are used up" if 0 < plan.max_restarts == outcome.restarts else ""
            )
            _log.error("%s%s", verdict.message, used_up)
        return verdict.exit_code


def _start_keeper(settings: RunSettings, records: Path) -> KeeperHost | None:
    if not block.are_available() or settings.snapshot_slots == 0:
        return None
    events = None if settings.job_events is None else str(settings.job_events)
    return KeeperHost(KeeperPlan(name=new_name(), verbosity=settings.verbosity, scratch=str(records), events=events))


class StopRequest:
    """Signals to the launcher: passed on to its ranks, with the deadline that the platform grants.

    A thread does the work, because the main thread may be inside torch's rendezvous, in which no Python handler
    runs.

    Args:
        settings: `grace_s`.
        records: the folder to remove when the process ends here.
        is_alone: whether there are no agents on other nodes.
        announcer: receives signals, and the end of the process here.
        on_exit: called with the exit code before the process ends here.
    """

    def __init__(
        self,
        settings: RunSettings,
        records: Path,
        *,
        is_alone: bool,
        announcer: Announcer,
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        # Ranks leave at grace - margin; what then still lives is killed with half the margin to spare.
        self._kill_after_s = settings.grace_s - settings.margin_s / 2
        self._margin_s = settings.margin_s
        self._announcer = announcer
        self._records = records
        self._is_alone = is_alone
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._pids: tuple[int, ...] = ()
        self._num_interrupts = 0
        self._deadline_s: float | None = None
        self._is_winding_up = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.signal = 0
        """The signal that stops this node, or 0."""
        self.killed = False
        """Whether ranks had to be killed."""

    def listen(self) -> None:
        """Own SIGTERM, SIGINT, SIGHUP and SIGUSR1 from here on; call it on the main thread."""
        for number in (*_STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, _leave_it_to_the_thread)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._serve, name="safepoint-signals", daemon=True).start()

    def watch(self, pids: Sequence[int]) -> None:
        """These are the ranks now, none while they are being replaced; an earlier request reaches them here."""
        with self._lock:
            self._pids = tuple(pids)
            if self.signal:
                self._send(signal.SIGTERM)

    def wind_up(self) -> tuple[int, bool]:
        """The ranks have ended: signals shorten what is left to do, and change nothing of how the run has ended.

        Returns:
            The signal that has stopped the ranks, or 0, and whether they had to be killed.
        """
        with self._lock:
            self._pids = ()
            self._is_winding_up = True
            return self.signal, self.killed

    @property
    def left_s(self) -> float | None:
        """Seconds until the remaining processes are killed; None without a request to stop."""
        if self.killed:
            return 0.0
        return None if self._deadline_s is None else max(0.0, self._deadline_s - clock.monotonic_s())

    @property
    def last_word_s(self) -> float:
        """How long the launcher may take to post the last status; short after a request to stop."""
        left_s = self.left_s
        return _LAST_WORD_S if left_s is None else max(0.25 * self._margin_s, min(left_s, _LAST_WORD_S))

    def request(self, number: int) -> None:
        """Stop the ranks of this node: they vote, save and leave."""
        with self._lock:
            if self.signal:
                return
            self.signal = number
            self._deadline_s = clock.monotonic_s() + self._kill_after_s
            self._send(signal.SIGTERM)
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")  # the thread now has a deadline to watch

    def _serve(self) -> None:
        while True:
            wait_s = None if self._deadline_s is None else max(0.0, self._deadline_s - clock.monotonic_s())
            ready, _, _ = select.select([self._reader], [], [], wait_s)
            for number in os.read(self._reader, 64) if ready else b"":
                self._answer(number)
            if self._deadline_s is not None and clock.monotonic_s() >= self._deadline_s:
                self._kill()
                self._deadline_s = None

    def _answer(self, number: int) -> None:
        if number == signal.SIGUSR1:
            with self._lock:
                self._send(signal.SIGUSR1)
            self._announcer.signalled(number)
        elif number in _STOP_SIGNALS:
            if number == signal.SIGINT:
                self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._kill()
                self._announcer.signalled(number)
                self._exit(ExitCode.SIGINT)
            if not self._pids and self._is_alone and not self._is_winding_up:
                self._announcer.signalled(number)
                self._exit(exit_code_of(number))
            # Agents of other nodes may be waiting for this one: it joins them first, to tell them.
            self.request(number)
            self._announcer.signalled(number)

    def _exit(self, code: int) -> None:
        self._announcer.end(code, "", limit_s=0.25 * self._margin_s)
        shutil.rmtree(self._records, ignore_errors=True)
        if self._on_exit is not None:
            self._on_exit(code)
        sys.stderr.flush()
        os._exit(code)

    def _kill(self) -> None:
        self.killed = True
        if not self._pids and not self._is_winding_up:
            self._exit(exit_code_of(self.signal))
        self.kill_ranks()

    def kill_ranks(self) -> None:
        """End the ranks at once, with everything that they have started."""
        for pid in self._pids:
            # Ranks lead sessions of their own: their data loaders go with them.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            (self._records / passed_on(signal.Signals(number).name)).touch()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Having a handler is what makes the interpreter write the number to the wake-up pipe."""


def _prepare_environment(settings: RunSettings) -> None:
    os.environ.update({name: text for name, text in settings.to_environment().items() if text})
    for name, text in settings.to_environment().items():
        if not text:
            os.environ.pop(name, None)
    if os.environ.get(STATUS_URL):
        # The Trainer's own callback would post beside the launcher, 100 % for a run that was interrupted.
        os.environ.setdefault("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    # Without this variable torch elastic kills ranks 30 s after a signal, whatever the platform grants.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(settings.grace_s))
    if settings.verbosity == 0:
        # Its reports describe our own exit codes as failures; what matters is in the verdict.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)


def rank_command(plan: LaunchPlan) -> tuple[str, list[str]]:
    """The command of one rank: interpreter and arguments."""
    module = ["-m"] if plan.is_module else []
    return sys.executable, ["-u", "-m", "safepoint.training", *module, *plan.program]
