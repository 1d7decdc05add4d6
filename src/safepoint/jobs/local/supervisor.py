"""The supervisor of one job: waits for slots (CPU cores and GPUs), starts launchers, and watches them.

The command is `python -m safepoint.jobs.local.supervisor JOB`. Each active job has one supervisor, with a lock that
the kernel releases when the process ends. What a supervisor has to remember is in the history of jobs.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from safepoint.errors import ExitCode, NotFoundError, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.events import console
from safepoint.foundation.files import FolderLock
from safepoint.foundation.processes import processes_of
from safepoint.jobs.local import slots
from safepoint.jobs.local.attempt import rank_reports, workspace
from safepoint.jobs.local.attempt.inputs import fetch_inputs, fetched
from safepoint.jobs.local.attempt.launchers import Launchers, launcher_environment
from safepoint.jobs.local.attempt.packages import install_packages
from safepoint.jobs.local.attempt.steps import JobStoppedError
from safepoint.jobs.local.attempt.thaw_watch import ThawWatch
from safepoint.jobs.local.history import History, HistoryError
from safepoint.jobs.local.images.last_resort import LastResort, were_late
from safepoint.jobs.local.paths import images_of, job_folder, supervisor_lock
from safepoint.jobs.local.supervisor_start import start_missing_supervisors
from safepoint.jobs.model.connections import keys_of
from safepoint.jobs.model.job_progress import output_of
from safepoint.jobs.model.outcome import conclude
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import PROGRESS_NAME
from safepoint.storage.location import parse_location

_POLL_S = 0.1
_LONGEST_PAUSE_S = 30.0
_CHECK_OTHERS_EVERY_S = 5.0
_LOOK_EVERY_S = 5.0
_TRIALS, _NEXT_TRIAL_S = 20, 3.0
_SILENT_START_S = 60.0
"""After this time, a job is shown as resumed even if its program has reported no progress."""
_log = logging.getLogger("safepoint")


class Supervisor:
    """Supervises one job.

    Args:
        name: the name of the job.
        history: the history of all jobs.

    Attributes:
        was_asked_to_leave: whether this process received a signal to exit.
    """

    def __init__(self, name: str, history: History) -> None:
        self._name = name
        self._history = history
        self._folder = job_folder(name)
        self._actor = f"supervisor {os.getpid()}"
        self._launchers: Launchers | None = None
        self._cause = ""
        self._image: str | None = None
        self.was_asked_to_leave = False
        self._check_others_at_s = clock.monotonic_s() + _CHECK_OTHERS_EVERY_S

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal to exit, for example at a shutdown: the job saves and stops, and the next `safepoint`
        command resumes it."""
        self.was_asked_to_leave = True

    def run(self) -> None:
        """Supervise the job until it needs no supervisor, or until this process received a signal to exit.

        If the deletion of the job was requested, the caller has to delete the job.

        Raises:
            NotFoundError: the job is no longer in the history.
            HistoryError: the history cannot be used; call `run` again to continue.
        """
        self._launchers = self._launchers or self._adopt()
        while self._launchers is not None or self._wait_for_turn():
            self._launchers = self._launchers or self._start()
            if self._launchers is not None:
                self._watch(self._launchers)
                self._conclude(self._launchers)
                self._launchers = None

    @property
    def _job(self) -> JobRecord:
        job = self._history.find(self._name)
        if job is None:
            raise NotFoundError(f"there is no job {self._name} any more")
        return job

    # ---- starting --------------------------------------------------------------------------------------------

    def _adopt(self) -> Launchers | None:
        """The launchers that an earlier supervisor has started; None if there are none."""
        job = self._job
        if not job.state.holds_slots or job.state is JobState.RESTARTING:
            return None
        launchers = Launchers(job.spec, self._folder, job.attempt, self._history.nodes(self._name, job.attempt))
        if not launchers.are_complete:
            # The earlier supervisor was killed before it had started all launchers, so no rank trains yet.
            launchers.kill()
        return launchers

    def _wait_for_turn(self) -> bool:
        """Wait until the job may start, and store its next attempt.

        Returns:
            False if the job is suspended or to be deleted, or if this process received a signal to exit.
        """
        capacity = slots.count_slots()
        pause_until_s = clock.monotonic_s() + min(_LONGEST_PAUSE_S, 0.5 * 2**self._job.setbacks)
        seen, look_at_s = -1, 0.0
        while not self.was_asked_to_leave:
            # Read all jobs only after a change of the history, or after some seconds.
            number, now_s = self._history.change_number(), clock.monotonic_s()
            if number != seen or now_s >= look_at_s:
                seen, look_at_s = number, now_s + _LOOK_EVERY_S
                if now_s < pause_until_s:
                    look_at_s = min(look_at_s, pause_until_s)
                with self._history.transaction():
                    turn = self._turn(capacity, has_paused=now_s >= pause_until_s)
                if turn is not None:
                    return turn
            self._start_missing_supervisors()
            clock.sleep(_POLL_S)
        return False

    def _turn(self, capacity: slots.Slots, *, has_paused: bool) -> bool | None:
        """Whether the job starts now; None to check again later. Call it in a transaction."""
        job = self._job
        if job.wanted is RequestedAction.DELETE or not job.needs_supervisor:
            return False
        # The number of nodes can change, because the job has no launchers. `admit` checks below whether slots are
        # free.
        if job.target_nodes is not None:
            self._history.change_nodes(job, job.target_nodes, actor=self._actor)
            self._history.become(self._name, JobState.QUEUED, actor=self._actor)
            job = self._job
        if job.wanted is RequestedAction.SUSPEND:
            message = "nothing is saved yet" if job.safe_step is None else f"step {job.safe_step} is saved"
            self._history.become(self._name, JobState.SUSPENDED, actor=self._actor, message=message)
            return False
        if job.wanted is RequestedAction.PREEMPT:  # preempted at once, because the job has no processes
            self._history.become(self._name, JobState.PREEMPTED, actor=self._actor, wanted=RequestedAction.RUN)
            job = self._job
        if job.state is JobState.RESTARTING:
            if has_paused:
                self._take(job)
            return True if has_paused else None
        others = [other for other in self._history.jobs(slots.CONCERNED) if other.name != self._name]
        admission = slots.admit(self._name, [*others, job], capacity)
        if admission.may_start:
            self._take(job)
            return True
        for victim in admission.preempt:
            cause = f"job {self._name} has priority {job.spec.priority}"
            self._history.request(victim, RequestedAction.PREEMPT, actor=f"job {self._name}", cause=cause)
        state = JobState.PREEMPTED if job.state is JobState.PREEMPTED else JobState.QUEUED
        message = f"waits for {admission.waits_for}"
        if (job.state, job.message) != (state, message):
            self._history.become(self._name, state, actor=self._actor, message=message)
        return None

    def _take(self, job: JobRecord) -> None:
        if self._goes_on(job):
            self._history.become(self._name, JobState.RESUMING, actor=self._actor)
            return
        self._take_next_attempt(job)

    def _goes_on(self, job: JobRecord) -> bool:
        """Whether the job continues from its image. False after a failure, because the job might fail again."""
        if job.image is None or job.from_checkpoint or job.state is JobState.RESTARTING:
            return False
        from safepoint.jobs.local.newest_state import newest_state  # imports the library of object stores

        try:
            output = output_of(job.spec, rank_reports.progress(self._folder))
            return newest_state(job, output).image is not None
        except (SafepointError, OSError) as error:
            _log.warning("the image of the job is not used: %s", error)
            return False

    def _take_next_attempt(self, job: JobRecord) -> None:
        state = JobState.RUNNING if job.attempt == 0 else JobState.RESUMING
        self._history.become(self._name, state, actor=self._actor, attempt=job.attempt + 1, image=None)
        self._history.begin_attempt(self._name, job.attempt + 1, job.spec.num_nodes)

    def _start(self) -> Launchers | None:
        """Start the launchers of the stored attempt, or restore them; None if that fails."""
        job = self._job
        if job.image is not None:
            restored = self._restore(job)
            if restored is not None:
                return restored
            job = self._job
        launchers = Launchers(job.spec, self._folder, job.attempt)
        try:
            if job.settings.freeze_as_last_resort:
                from safepoint.transparent.self_test import find_working_criu  # imports numpy

                find_working_criu()
            launchers.wait_until_gone()  # a keeper of the previous attempt may still run
            secrets = keys_of(job.spec.data_connection) if job.spec.data_connection else {}
            extra = install_packages(job.spec, self._folder, may_continue=self._may_continue)
            environ = launcher_environment(job.spec, secrets, extra)
            fetch_inputs(job.spec, self._folder, environ, may_continue=self._may_continue)
            self._wait_for_workspace(job)
            launchers.reserve_port(self._may_continue)
            for node in range(job.spec.num_nodes):
                with self._history.transaction():  # meanwhile no other supervisor can take the same devices
                    record = launchers.start(node, environ, self._free_gpus(job))
                    self._history.add_node(self._name, job.attempt, record)
        except JobStoppedError:
            return launchers  # these launchers are empty: none was started
        except HistoryError:
            launchers.kill()  # the history may lack the launcher that was started last
            self._launchers = launchers  # the next call of `run` stores the end of these launchers
            raise
        except (SafepointError, OSError) as error:
            launchers.kill()
            code = error.exit_code if isinstance(error, SafepointError) else ExitCode.FAILED
            with self._history.transaction():
                self._history.end_attempt(self._name, job.attempt, outcome=str(error), exit_code=code)
                self._history.become(
                    self._name, JobState.FAILED, actor=self._actor, message=str(error), exit_code=int(code)
                )
            return None
        return launchers

    def _restore(self, job: JobRecord) -> Launchers | None:
        """Restore the launchers from the image of the job. If that fails, store the next attempt."""
        from safepoint.jobs.local.images.job_images import restore_job  # imports numpy

        Launchers(job.spec, self._folder, job.attempt).wait_until_gone()
        try:
            restore_job(self._history, job, actor=self._actor)
        except (SafepointError, OSError) as error:
            outcome = (
                f"the job could not be restored from {job.image}: {error}; it continues from its newest checkpoint"
            )
            _log.warning("%s", outcome)
            with self._history.transaction():
                self._history.end_attempt(self._name, job.attempt, outcome=outcome, exit_code=None)
                self._history.become(self._name, JobState.RESUMING, actor=self._actor, message=outcome)
                self._take_next_attempt(self._job)
            return None
        return Launchers(job.spec, self._folder, job.attempt, self._history.nodes(self._name, job.attempt))

    def _wait_for_workspace(self, job: JobRecord) -> None:
        """Let `/workspace/dataset` and `/workspace/model` lead to the inputs of the job.

        While another job uses other files at these paths, wait.

        Raises:
            JobStoppedError: the job has to stop.
            SafepointError: a path leads to something else, or an input is gone.
        """
        waits_for = None
        while (conflict := self._enter_workspace(job)) is not None:
            if conflict != waits_for:
                waits_for = conflict
                user, target = conflict
                message = f"waits for job {user}, which uses other files at {target}"
                self._history.become(self._name, self._job.state, actor=self._actor, message=message)
            if not self._may_continue():
                raise JobStoppedError
            self._start_missing_supervisors()
            clock.sleep(_POLL_S)
        if waits_for is not None:
            self._history.become(self._name, self._job.state, actor=self._actor)

    def _enter_workspace(self, job: JobRecord) -> tuple[str, str] | None:
        """Set the links to the inputs of the job. If another job uses other files there, return that job's name, and
        the path."""
        wanted = {one.target: fetched(self._folder, one) for one in job.spec.inputs}
        with self._history.transaction():  # meanwhile no other supervisor can set the links
            others = [other for other in self._history.jobs(slots.HOLDING) if other.name != self._name]
            for other in others if wanted else ():
                for one in other.spec.inputs:
                    theirs = fetched(job_folder(other.name), one)
                    is_in_use = theirs is not None and workspace.content_of(one.target) == theirs
                    if is_in_use and wanted.get(one.target, theirs) != theirs:
                        return other.name, one.target
            for target, path in wanted.items():
                if path is None:
                    raise StorageError(f"what was fetched for {target} was deleted meanwhile", hint="resume the job")
                if workspace.content_of(target) != path:
                    workspace.point(target, path)
        return None

    def _may_continue(self) -> bool:
        return not self._job.is_to_stop and not self.was_asked_to_leave

    def _free_gpus(self, job: JobRecord) -> tuple[str, ...] | None:
        if not job.spec.gpu_per_node:
            return () if slots.has_devices() else None
        taken = [
            gpu
            for other in self._history.jobs(slots.HOLDING)
            for node in self._history.nodes(other.name, other.attempt)
            for gpu in node.gpus
        ]
        return slots.free_gpus(taken, job.spec.gpu_per_node, slots.devices())

    # ---- running ----------------------------------------------------------------------------------------------

    def _watch(self, launchers: Launchers) -> None:
        """Carry out requests until all launchers have ended."""
        began_s, earlier = clock.monotonic_s(), rank_reports.newest_report(self._folder)
        settings, pids = self._job.settings, launchers.pids
        path, own = self._folder / PROGRESS_NAME, partial(processes_of, self._folder)
        watch = ThawWatch(path, own, is_late=were_late(pids)) if self._job.is_thawed else None
        resort = LastResort(settings, pids, images_of(self._name)) if settings.freeze_as_last_resort else None
        while launchers.are_alive:
            job = self._job
            # If the state is SUSPENDING although RUN is requested, the job was resumed, but the suspension completes
            # first.
            if job.is_to_stop or self.was_asked_to_leave or job.state is JobState.SUSPENDING:
                if job.state is not JobState.SUSPENDING:
                    is_scaled = job.wanted is RequestedAction.RUN and job.target_nodes
                    cause = f"scaled to {job.target_nodes} nodes" if is_scaled else str(job.wanted)
                    self._history.become(self._name, JobState.SUSPENDING, actor=self._actor, cause=cause)
                launchers.ask_to_stop()
            elif job.state is JobState.RESUMING:
                if self._has_resumed(began_s, earlier, is_watched=watch is not None and watch.limit_s is not None):
                    self._history.become(self._name, JobState.RUNNING, actor=self._actor)
                elif watch is not None and watch.is_stuck():
                    self._cause = watch.cause
                    launchers.kill()
            if resort is not None and launchers.pids == pids:
                resort.look()
                if resort.is_due(launchers.asked_s) and self._may_freeze(job):
                    self._freeze(resort)
            launchers.enforce()
            self._start_missing_supervisors()
            clock.sleep(_POLL_S)

    def _may_freeze(self, job: JobRecord) -> bool:
        """Whether an image of the job would be used: False if the job is to be deleted or scaled."""
        return job.wanted is not RequestedAction.DELETE and job.target_nodes is None

    def _freeze(self, resort: LastResort) -> None:
        """Make an image of launchers that do not end in time. If that fails, they run until they are killed."""

        def note(image: str) -> None:
            self._history.note_image(self._name, image, actor=self._actor)
            self._image = image

        try:
            resort.freeze(before_end=note)
        except (SafepointError, OSError) as error:
            message = f"the job cannot be saved in time, and could not be frozen: {error}"
            _log.warning("%s", message)
            self._history.become(self._name, self._job.state, actor=self._actor, message=message)

    def _has_resumed(self, began_s: float, earlier: tuple[int, int] | None, *, is_watched: bool) -> bool:
        has_reported = rank_reports.newest_report(self._folder) != earlier
        return has_reported or (not is_watched and clock.monotonic_s() - began_s >= _SILENT_START_S)

    def _conclude(self, launchers: Launchers) -> None:
        """Store the end of the attempt and the new state of the job."""
        launchers.wait_until_gone()
        safe, is_not_stored = rank_reports.newest_step(self._folder)
        progress = rank_reports.progress(self._folder)
        output = output_of(self._job.spec, progress)
        is_missing = is_not_stored and output is not None and parse_location(output).is_remote
        exit_codes = launchers.exit_codes
        with self._history.transaction():
            job = self._job
            outcome = conclude(
                exit_codes,
                self._was_wanted(job),
                safe_step=safe,
                missing_in=output or "" if is_missing else "",
                has_progressed=safe is not None and safe > (job.safe_step or 0),
                setbacks=job.setbacks,
                early_end="" if progress is None else progress.early_end,
                image=job.image if job.wanted is RequestedAction.FREEZE else self._image,
                cause=self._cause,
            )
            self._cause, self._image = "", None
            columns: dict[str, Any] = {
                "exit_code": outcome.exit_code,
                "safe_step": safe,
                "setbacks": outcome.setbacks,
            }
            if outcome.state is JobState.PREEMPTED and job.wanted is RequestedAction.PREEMPT:
                columns["wanted"] = RequestedAction.RUN
            resumes = outcome.state is JobState.SUSPENDED and job.wanted is RequestedAction.RUN
            state = JobState.QUEUED if resumes else outcome.state
            text = f"{outcome.state}: {outcome.message}" if outcome.message else str(outcome.state)
            self._history.end_attempt(self._name, job.attempt, outcome=text, exit_code=outcome.exit_code)
            if job.target_nodes is not None and not state.is_over:
                self._history.change_nodes(job, job.target_nodes, actor=self._actor)
            self._history.become(self._name, state, actor=self._actor, message=outcome.message, **columns)
        launchers.tidy()

    def _was_wanted(self, job: JobRecord) -> RequestedAction:
        """The request that has ended the launchers; RUN if there was none."""
        if job.wanted is RequestedAction.RUN and self.was_asked_to_leave:
            return RequestedAction.PREEMPT
        if job.wanted is RequestedAction.RUN and (job.target_nodes is not None or job.state is JobState.SUSPENDING):
            # The launchers were stopped to change the number of nodes, or by an earlier request to suspend the job.
            # The job resumes afterwards.
            return RequestedAction.SUSPEND
        return job.wanted

    def _start_missing_supervisors(self) -> None:
        """Every few seconds, start the missing supervisors of other jobs."""
        if clock.monotonic_s() >= self._check_others_at_s:
            self._check_others_at_s = clock.monotonic_s() + _CHECK_OTHERS_EVERY_S
            start_missing_supervisors(self._history, but=self._name, patience_s=0)


def supervise(name: str) -> int:
    """Supervise a job, unless another process supervises it.

    Raises:
        StorageError: the history, or the job's folder, cannot be used.
    """
    console.set_up(0)
    while True:
        try:
            lock = _lock(supervisor_lock(name))
        except FileNotFoundError:
            return ExitCode.NOT_FOUND  # the job was deleted
        if lock is None:
            return 0
        with History() as history:
            has_to_exit = _supervise(name, history)
            lock.release()
            # Check for requests again. A command may have stored a request while this process held the lock. Such a
            # command has started no other supervisor.
            job = history.find(name)
            if job is None or has_to_exit or not job.needs_supervisor:
                return ExitCode.NOT_FOUND if job is None else 0


def _supervise(name: str, history: History) -> bool:
    """Supervise the job. Returns whether this process received a signal to exit."""
    supervisor = Supervisor(name, history)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.leave)
    try:
        _run(supervisor)
        job = history.find(name)
        if job is not None and job.wanted is RequestedAction.DELETE:
            history.remove(name)
    except NotFoundError:
        # Another process has removed the job's entry, so this process has to end the job's processes.
        history.remove_remains(name)
    return supervisor.was_asked_to_leave


def _run(supervisor: Supervisor) -> None:
    for _ in range(_TRIALS - 1):
        try:
            return supervisor.run()
        except HistoryError as error:  # for example, the disk is full; the job itself continues
            _log.warning("%s; trying again in %g s", error, _NEXT_TRIAL_S)
            clock.sleep(_NEXT_TRIAL_S)
    return supervisor.run()


def _lock(path: Path) -> FolderLock | None:
    """The lock, or None when another process holds it."""
    try:
        lock = FolderLock.acquire(path, {"pid": os.getpid()})
    except BlockingIOError:
        return None
    if lock is None:
        raise StorageError(
            f"the file system of {path.parent} does not support file locks, which background jobs need",
            hint="set XDG_STATE_HOME to a folder on a local disk",
        )
    return lock


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    try:
        return supervise(arguments[0])
    except SafepointError as error:
        _log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
