"""The supervisor of one job: waits for slots, starts launchers, watches them, and writes down what the job is.

`python -m holdfast.jobs.supervisor JOB`. There is one for each job that runs or will run by itself, known by a
lock that the kernel gives back when it dies. Whatever it knows is in the history: a new one goes on where the last
one was killed.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import ExitCode, HoldfastError
from holdfast.foundation import clock, console
from holdfast.foundation.files import FolderLock
from holdfast.jobs import slots, told
from holdfast.jobs.connections import keys_of
from holdfast.jobs.history import History
from holdfast.jobs.launchers import Launchers, launcher_environment
from holdfast.jobs.outcome import conclude
from holdfast.jobs.packages import install_packages
from holdfast.jobs.places import job_folder, supervisor_lock
from holdfast.jobs.records import JobRecord
from holdfast.jobs.removing import remove_job
from holdfast.jobs.reviving import revive
from holdfast.jobs.state import JobState, Wanted

_POLL_S = 0.1
_LONGEST_PAUSE_S = 30.0
_REVIVE_EVERY_S = 5.0
_LOCK_WITHIN_S = 2.0
_SILENT_START_S = 60.0
"""A program that tells no progress counts as resumed after this."""
_log = logging.getLogger("holdfast")


class Supervisor:
    """Looks after one job.

    Args:
        name: the job's.
        history: where everybody's truth is.
    """

    def __init__(self, name: str, history: History) -> None:
        self._name = name
        self._history = history
        self._folder = job_folder(name)
        self._actor = f"supervisor {os.getpid()}"
        self._was_told_to_leave = False
        self._revive_at_s = clock.monotonic_s() + _REVIVE_EVERY_S

    def leave(self, number: int, frame: FrameType | None) -> None:
        """The machine shuts down, or somebody means this process: the job saves and goes on with the next command."""
        self._was_told_to_leave = True

    def run(self) -> None:
        """Look after the job until nobody has to."""
        launchers = self._adopt()
        while True:
            if launchers is None:
                keeps_slots = self._job.state is JobState.RESTARTING
                if not (self._pause() if keeps_slots else self._wait_for_slots()):
                    return
                launchers = self._start()
                if launchers is None:
                    return
            self._watch(launchers)
            if not self._conclude(launchers):
                return
            launchers = None

    @property
    def _job(self) -> JobRecord:
        return self._history.job(self._name)

    # ---- beginning --------------------------------------------------------------------------------------------

    def _adopt(self) -> Launchers | None:
        """The launchers that an earlier supervisor has started, when the job had some."""
        job = self._job
        if not job.state.holds_slots or job.state is JobState.RESTARTING:
            return None
        launchers = Launchers(job.spec, self._folder, job.attempt, self._history.nodes(self._name, job.attempt))
        if not launchers.are_complete:
            launchers.kill()  # it was killed while it started them: they have not met, and nothing is lost
        return launchers

    def _wait_for_slots(self) -> bool:
        """Until the job may start; False when it shall not any more."""
        capacity = slots.count_slots()
        while True:
            job = self._job
            if self._settle(job):
                return False
            with self._history.transaction():
                others = [other for other in self._history.jobs(slots.CONCERNED) if other.name != self._name]
                admission = slots.admit(self._name, [*others, job], capacity)
                if admission.may_start:
                    self._take(job)
                    return True
                for victim in admission.preempt:
                    cause = f"job {self._name} has priority {job.spec.priority}"
                    self._history.want(victim, Wanted.PREEMPT, actor=f"job {self._name}", cause=cause)
                state = JobState.PREEMPTED if job.state is JobState.PREEMPTED else JobState.QUEUED
                message = f"waits for {admission.waits_for}"
                if (job.state, job.message) != (state, message):
                    self._history.become(self._name, state, actor=self._actor, message=message)
            self._look_around()
            clock.sleep(_POLL_S)

    def _pause(self) -> bool:
        """Before a job is started again on the slots that it has; False when it shall not be."""
        until_s = clock.monotonic_s() + min(_LONGEST_PAUSE_S, 0.5 * 2**self._job.setbacks)
        while True:
            job = self._job
            if self._settle(job):
                return False
            if clock.monotonic_s() >= until_s:
                with self._history.transaction():
                    self._take(job)
                return True
            clock.sleep(_POLL_S)

    def _settle(self, job: JobRecord) -> bool:
        """What is to be done with a job that has no processes; whether that was all."""
        if job.wanted is Wanted.DELETE:
            remove_job(self._name, self._history)
            return True
        if self._was_told_to_leave:
            return True
        if job.wanted is Wanted.RUN:
            return False
        if job.wanted is Wanted.PREEMPT:  # it has no processes to stop, and gives up its slots by waiting again
            self._history.want(self._name, Wanted.RUN, actor=self._actor)
            if job.state is JobState.RESTARTING:
                self._history.become(self._name, JobState.PREEMPTED, actor=self._actor)
                return self._wait_for_slots() is False
            return False
        message = "nothing is saved yet" if job.safe_step is None else f"step {job.safe_step} is safe"
        self._history.become(self._name, JobState.SUSPENDED, actor=self._actor, message=message)
        return True

    def _take(self, job: JobRecord) -> None:
        state = JobState.RUNNING if job.attempt == 0 else JobState.RESUMING
        self._history.become(self._name, state, actor=self._actor, attempt=job.attempt + 1)
        self._history.begin_attempt(self._name, job.attempt + 1, job.spec.num_nodes)

    def _start(self) -> Launchers | None:
        """Start the launchers of the attempt that has just been written down; None when that cannot be."""
        job = self._job
        launchers = Launchers(job.spec, self._folder, job.attempt)
        try:
            launchers.wait_until_gone()  # a keeper of the attempt before may be ending
            secrets = keys_of(job.spec.data_connection) if job.spec.data_connection else {}
            extra = install_packages(job.spec, self._folder)
            environ = launcher_environment(job.spec, secrets, extra)
            for node in range(job.spec.num_nodes):
                record = launchers.start(node, environ, self._free_gpus(job))
                self._history.add_node(self._name, job.attempt, record)
        except (HoldfastError, OSError) as error:
            launchers.kill()
            code = error.exit_code if isinstance(error, HoldfastError) else ExitCode.FAILED
            with self._history.transaction():
                self._history.end_attempt(self._name, job.attempt, outcome=str(error), exit_code=code)
                self._history.become(
                    self._name, JobState.FAILED, actor=self._actor, message=str(error), exit_code=int(code)
                )
            return None
        return launchers

    def _free_gpus(self, job: JobRecord) -> tuple[int, ...]:
        if not job.spec.gpu_per_node:
            return ()
        taken = [
            gpu
            for other in self._history.jobs(slots.HOLDING)
            for node in self._history.nodes(other.name, other.attempt)
            for gpu in node.gpus
        ]
        return slots.free_gpus(taken, job.spec.gpu_per_node, slots.count_slots())

    # ---- running ----------------------------------------------------------------------------------------------

    def _watch(self, launchers: Launchers) -> None:
        """Until all launchers have ended; does meanwhile what is wanted of the job."""
        began_s = clock.wall_s()
        while launchers.are_alive:
            job = self._job
            if job.wanted is not Wanted.RUN or self._was_told_to_leave:
                if job.state is not JobState.SUSPENDING:
                    self._history.become(self._name, JobState.SUSPENDING, actor=self._actor, cause=str(job.wanted))
                launchers.ask_to_stop()
            elif job.state is not JobState.RUNNING and self._has_resumed(began_s):
                self._history.become(self._name, JobState.RUNNING, actor=self._actor)
            launchers.enforce()
            self._look_around()
            clock.sleep(_POLL_S)

    def _has_resumed(self, began_s: float) -> bool:
        return told.was_told_since(self._folder, began_s) or clock.wall_s() - began_s >= _SILENT_START_S

    def _conclude(self, launchers: Launchers) -> bool:
        """Write down how the attempt ended; whether the job is to be started again here."""
        launchers.wait_until_gone()
        job = self._job
        safe = told.safe_step(self._folder)
        wanted = Wanted.PREEMPT if self._was_told_to_leave and job.wanted is Wanted.RUN else job.wanted
        outcome = conclude(
            launchers.exit_codes,
            wanted,
            safe_step=safe,
            has_progressed=safe is not None and safe > (job.safe_step or 0),
            setbacks=job.setbacks,
        )
        figures: dict[str, Any] = {"exit_code": outcome.exit_code, "safe_step": safe, "setbacks": outcome.setbacks}
        with self._history.transaction():
            text = f"{outcome.state}: {outcome.message}" if outcome.message else str(outcome.state)
            self._history.end_attempt(self._name, job.attempt, outcome=text, exit_code=outcome.exit_code)
            if outcome.state is JobState.PREEMPTED and job.wanted is Wanted.PREEMPT:
                figures["wanted"] = Wanted.RUN
            self._history.become(self._name, outcome.state, actor=self._actor, message=outcome.message, **figures)
        launchers.tidy()
        if job.wanted is Wanted.DELETE:
            remove_job(self._name, self._history)
            return False
        return outcome.state.is_active and not self._was_told_to_leave

    def _look_around(self) -> None:
        """Now and then, see that the other jobs have their supervisors."""
        if clock.monotonic_s() >= self._revive_at_s:
            self._revive_at_s = clock.monotonic_s() + _REVIVE_EVERY_S
            revive(self._history, but=self._name)


def supervise(name: str) -> int:
    """Look after a job, unless somebody does already."""
    console.set_up(0)
    lock = _lock(supervisor_lock(name))
    if lock is None:
        return 0
    with History() as history:
        if history.find(name) is None:
            return ExitCode.NOT_FOUND
        supervisor = Supervisor(name, history)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, supervisor.leave)
        supervisor.run()
    return 0


def _lock(path: Path) -> FolderLock | None:
    deadline_s = clock.monotonic_s() + _LOCK_WITHIN_S
    while clock.monotonic_s() < deadline_s:
        with contextlib.suppress(BlockingIOError):  # whoever looks whether it is held, holds it for a moment
            return FolderLock.acquire(path, {"pid": os.getpid()})
        clock.sleep(0.02)
    return None


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    try:
        return supervise(arguments[0])
    except HoldfastError as error:
        _log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


__all__ = ["Supervisor", "main", "supervise"]
