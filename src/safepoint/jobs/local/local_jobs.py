"""Jobs on this machine.

Commands store their requests in the history of the jobs. The supervisor of a job reads the requests there. It is the
process that starts the job's launchers, and watches them.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safepoint.errors import (
    ConflictError,
    NotFoundError,
    SafepointError,
    StorageError,
    WaitTimeoutError,
)
from safepoint.foundation import clock
from safepoint.foundation.files import FolderLock, is_locked, write_atomic
from safepoint.jobs.local.attempt import rank_reports
from safepoint.jobs.local.attempt.logs import FOLDER, read_logs
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder, make_private, new_job_folder, supervisor_lock
from safepoint.jobs.local.slots import check_size, count_slots, remark_on
from safepoint.jobs.local.submission import checked
from safepoint.jobs.local.supervisor_start import start_missing_supervisors, start_supervisor
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.job_progress import in_use_message, output_of, place_of
from safepoint.jobs.model.records import AttemptRecord, JobEvent, JobRecord, JobSummary, RequestedAction, this_user
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import METRICS_NAME
from safepoint.progress.record import PROGRESS_NAME, Progress

_AGAIN = "to train further, delete it (its checkpoints stay) and submit it again"
_POLL_S = 0.1
_EXITS_WITHIN_S = 15.0
"""How long to wait for the supervisor of a stopped job to exit."""


class LocalJobs:
    """The jobs of this user on this machine.

    Methods accept the beginning of a job's name, if no other name begins with the same letters.

    The constructor starts a new supervisor for each job whose supervisor was killed.

    Args:
        actor: the user or program that requests changes; stored with the events.
    """

    def __init__(self, *, actor: str | None = None) -> None:
        self._actor, self._history = actor or this_user(), History()
        self._folders = f"{job_folder('')}{os.sep}"  # objects of Path would be slow for many jobs
        with contextlib.suppress(ConflictError):
            start_missing_supervisors(self._history)

    def __enter__(self) -> "LocalJobs":
        return self

    def __exit__(self, *_: object) -> None:
        self._history.close()

    # ---- reading ----------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRecord]:
        """All jobs, oldest first."""
        return self._history.jobs()

    def summaries(self) -> list[JobSummary]:
        """Summaries of all jobs, oldest first."""
        return self._history.summaries()

    def job(self, name: str) -> JobRecord:
        """One job, by its name or its first letters."""
        return self._history.job(name)

    def attempts(self, name: str) -> list[AttemptRecord]:
        """The attempts of a job, oldest first."""
        return self._history.attempts(self.job(name).name)

    def events(self, name: str, *, last_bytes: int = rank_reports.MOST_BYTES) -> list[JobEvent]:
        """The events that users, supervisors and ranks have caused for a job, oldest first; see `job_events`."""
        name = self.job(name).name
        happened = self._history.events(name)
        happened += rank_reports.job_events(job_folder(name), last_bytes=last_bytes)
        return sorted(happened, key=lambda event: event.time)

    def change_number(self) -> int:
        """A number that changes when another process has changed a job; see also `report_mark`."""
        return self._history.change_number()

    def report_mark(self, name: str) -> tuple[object, ...]:
        """A value that changes when the ranks of a job have reported progress or an event. Takes the full name."""
        folder = f"{self._folders}{name}{os.sep}"
        return rank_reports.mark_of(folder + PROGRESS_NAME), rank_reports.mark_of(folder + rank_reports.EVENTS)

    def metrics_file(self, name: str) -> Path:
        """The file of the `MetricHistory` of a job. Takes the full name."""
        return job_folder(name) / METRICS_NAME

    def progress_of(self, job: JobRecord | JobSummary) -> Progress | None:
        """The last progress report of the first rank; None before the first report."""
        return rank_reports.progress(job_folder(job.name))

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        step: str | None = None,
        follow: bool = False,
        last_bytes: int | None = None,
    ) -> Iterator[LogLine]:
        """The output of a job.

        Args:
            name: the name of the job.
            rank: return only the output of this rank.
            node: return only the output of this node: of its launcher and its ranks.
            step: return only the output of this step before the launchers start: `dataset-initializer` or
                `model-initializer`.
            follow: wait for new lines until the job has stopped; with `step`, until the launchers have started.
            last_bytes: begin this many bytes before the end of the output of each process; None for the beginning.

        Raises:
            NotFoundError: there is no such job, or it has no such rank.
        """
        job = self.job(name)
        name, each = job.name, job.spec.ranks_per_node
        ranks, nodes = None, None
        if node is not None:
            ranks, nodes = range(node * each, (node + 1) * each), range(node, node + 1)
        if rank is not None:
            self._check_rank(job, rank)
            ranks, nodes = range(rank, rank + 1), range(0)

        def is_over() -> bool:
            job = self._history.find(name)
            if job is not None and step is not None and self._history.nodes(name, job.attempt):
                return True
            return job is None or not job.needs_supervisor

        is_over_now = is_over if follow else None
        yield from read_logs(
            job_folder(name), ranks=ranks, nodes=nodes, step=step, is_over=is_over_now, last_bytes=last_bytes
        )

    def watch(self, name: str | None, *, interval_s: float) -> Iterator[list[JobRecord]]:
        """The active jobs, or one job, at every interval; see `JobPlace.watch`."""
        before: set[str] = set()
        while True:
            if name is not None:
                found = [self.job(name)]
                name = found[0].name  # use the full name: the first letters may match another job later
            else:
                found = [job for job in self.jobs() if job.state.is_active or job.name in before]
                before = {job.name for job in found if job.state.is_active}
            yield found
            if name is not None and not found[0].needs_supervisor:
                return
            clock.sleep(interval_s)

    def _check_rank(self, job: JobRecord, rank: int) -> None:
        num_ranks = job.spec.num_nodes * job.spec.ranks_per_node
        # A rank that existed only with an earlier, larger number of nodes still has its log.
        if rank >= num_ranks and not (job_folder(job.name) / FOLDER / f"rank-{rank}.log").exists():
            there = "0 only" if num_ranks == 1 else f"0 to {num_ranks - 1}"
            raise NotFoundError(f"job {job.name} has no rank {rank}", hint=f"ranks of the job: {there}")

    def remark_on(self, job: JobRecord) -> str:
        """A warning if the job requests more cores than this machine has; otherwise empty."""
        return remark_on(job.spec, count_slots())

    # ---- changing ------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, files: Mapping[str, bytes] | None = None) -> JobRecord:
        """Store a job and start its supervisor. The job runs when its slots are free."""
        spec = checked(spec)
        new = make_private(new_job_folder())
        try:
            for file, data in (files or {}).items():
                write_atomic(new / file, data, durable=True)
            self._store(spec, new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        try:
            start_supervisor(spec.name, is_new=True)
        except BaseException:
            self._remove(spec.name)
            raise
        return self.job(spec.name)

    def _store(self, spec: JobSpec, new: Path) -> None:
        """Store the job, and rename `new` to the job's folder. From then on, any process may start the supervisor."""
        with self._history.transaction():
            self._check_output_is_free(spec, output_of(spec, None))
            self._history.add(spec, actor=self._actor)
            if is_locked(supervisor_lock(spec.name)):
                raise ConflictError(
                    f"processes of a deleted job {spec.name!r} still run; nothing was submitted",
                    hint="choose another name, or end these processes first",
                )
            shutil.rmtree(job_folder(spec.name), ignore_errors=True)
            new.rename(job_folder(spec.name))

    def _check_output_is_free(self, spec: JobSpec, output: str | None) -> None:
        """Raise ConflictError if another job that has not ended writes to the output location."""
        for other in self._others_at(spec, output):
            if other.needs_supervisor:
                raise ConflictError(
                    f"job {other.name} writes to {output} and has not ended",
                    hint="use another output location, or suspend or delete that job first",
                )

    def _others_at(self, spec: JobSpec, output: str | None) -> list[JobRecord]:
        if output is None:
            return []
        place = place_of(spec, output)
        others = [other for other in self._history.unfinished() if other.name != spec.name]
        outputs = [(other, self.output_of(other)) for other in others]
        return [other for other, its in outputs if its is not None and place_of(other.spec, its) == place]

    def _request(self, job: JobRecord, wanted: RequestedAction) -> None:
        if job.wanted is RequestedAction.DELETE:
            raise ConflictError(f"job {job.name} is being deleted")
        self._history.request(job.name, wanted, actor=self._actor)

    def suspend(self, name: str, *, timeout_s: float | None = None) -> JobRecord:
        """Save a checkpoint and stop a job, and wait until it is suspended.

        Raises:
            ConflictError: the job has ended or is being deleted, or another command has replaced this request.
            WaitTimeoutError: the job has not stopped yet; the request stays in effect.
        """
        with self._history.transaction():
            job = self.job(name)
            if job.state.is_over:
                raise ConflictError(f"job {job.name} cannot be suspended: it is {job.state}")
            if job.state is not JobState.SUSPENDED or job.wanted is not RequestedAction.SUSPEND:
                self._request(job, RequestedAction.SUSPEND)

        def has_stopped(job: JobRecord) -> bool:
            if job.state.is_over or (job.state is JobState.SUSPENDED and job.wanted is RequestedAction.SUSPEND):
                return True
            if job.wanted is not RequestedAction.SUSPEND:
                raise ConflictError(f"job {job.name} was not suspended: another command requested {job.wanted}")
            return False

        return self._until(job.name, has_stopped, "suspended", timeout_s)

    def resume(self, name: str, *, step: int | None = None, from_checkpoint: bool = False) -> JobRecord:
        """Continue a suspended or failed job from its process image or its newest checkpoint; see `newest_state`.

        With `step`, it continues from the checkpoint of this step. No image is used with `step` or `from_checkpoint`.

        Raises:
            ConflictError: the job is active, complete or being deleted, or another job writes to its output location.
            SafepointError: see `choice_of` and `newest_state`.
        """
        from safepoint.jobs.local import chosen_checkpoint  # imports the library of object stores
        from safepoint.jobs.local.newest_state import newest_state

        with self._history.transaction():
            job = self.job(name)
            if job.state is JobState.COMPLETE:
                raise ConflictError(f"job {job.name} is complete", hint=_AGAIN)
            if job.state.is_active and job.wanted in {RequestedAction.RUN, RequestedAction.PREEMPT}:
                raise ConflictError(
                    f"job {job.name} is {job.state}, not suspended",
                    hint=f"`safepoint logs -f {job.name}` shows its output",
                )
            output = self.output_of(job)
            self._check_output_is_free(job.spec, output)
            spec, what = chosen_checkpoint.spec_for(job, output, step)
            from_checkpoint |= step is not None
            begin = newest_state(job, output, from_checkpoint=from_checkpoint)
            self._history.change_spec(job, spec, actor=self._actor, what=what, from_checkpoint=from_checkpoint)
            self._request(job, RequestedAction.RUN)
            if not job.state.is_active:
                why, image = begin.why, begin.image
                cause = "restarted after a failure" if job.state is JobState.FAILED else ""
                self._history.become(
                    job.name, JobState.QUEUED, actor=self._actor, cause=cause, message=why, setbacks=0, image=image
                )
            job = self.job(job.name)
        if not is_locked(supervisor_lock(job.name)):
            start_supervisor(job.name)
        return job

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> JobRecord:
        """Change a job's number of nodes. A running job is saved, stopped and restarted.

        The supervisor does this, even if the caller is killed or stops waiting.

        Raises:
            UsageError: `num_nodes` is invalid, or too large for this machine.
            ConflictError: the job is complete or being deleted, or it ended before the change.
            WaitTimeoutError: the job has not been changed yet; the request stays in effect.
        """
        with self._history.transaction():
            job = self.job(name)
            spec = replace(job.spec, num_nodes=num_nodes)
            if job.state is JobState.COMPLETE:
                raise ConflictError(f"job {job.name} is complete", hint=_AGAIN)
            if job.wanted is RequestedAction.DELETE:
                raise ConflictError(f"job {job.name} is being deleted")
            check_size(spec, count_slots())
            if num_nodes != (job.target_nodes or job.spec.num_nodes):
                change = self._history.request_nodes if job.state.holds_slots else self._history.change_nodes
                change(job, num_nodes, actor=self._actor)
        what = f"scaled to {num_nodes} nodes"
        job = self._until(job.name, lambda job: job.target_nodes is None, what, timeout_s)
        if job.spec.num_nodes != num_nodes:
            why = f": {job.message}" if job.message else ""
            raise ConflictError(f"job {job.name} was not {what}: it is {job.state}{why}")
        return job

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> int:
        """Stop a job and remove it; its checkpoints stay unless `with_checkpoints` is set.

        Returns:
            The number of deleted checkpoints.

        Raises:
            ConflictError: with `with_checkpoints`, its output location is unknown, or another job uses it.
            StorageError: its checkpoints or its folder cannot be deleted. The job is stopped but still exists; call
                `delete` once more.
            WaitTimeoutError: the job has not stopped in time.
        """
        name = self._history.name_of(name)
        try:
            job = self.job(name)
        except StorageError:  # the entry of the job cannot be read, so the job cannot be saved before it ends
            if with_checkpoints:
                raise
            self._history.forget(name)
            self._history.remove_remains(name)
            return 0
        if with_checkpoints:
            return self._delete_all(job, timeout_s)
        if not self._remove(name):
            with contextlib.suppress(NotFoundError):  # the supervisor has deleted the job
                self._until(name, lambda _: False, "deleted", timeout_s)
        return 0

    def _delete_all(self, job: JobRecord, timeout_s: float | None) -> int:
        """Delete the checkpoints of a job, then the job. If this fails, the job still exists."""
        from safepoint.jobs.local.outputs import remove_checkpoints  # imports the library of object stores

        output = self.output_of(job)
        alone = f"delete {job.name} and keep its checkpoints: `safepoint delete {job.name}`"
        if output is None:
            raise ConflictError(
                f"the output location of job {job.name} is unknown: its options do not set it, and its ranks have "
                "not reported it; nothing was deleted",
                hint=alone,
            )
        others = [other.name for other in self._others_at(job.spec, output) if not other.state.is_over]
        if others:
            hint = f"first delete {', '.join(others)}; or {alone}"
            raise ConflictError(in_use_message(others, str(output)), hint=hint)
        with self._stopped(job.name, timeout_s):
            num_deleted = remove_checkpoints(output, job.spec)
            self._history.request(job.name, RequestedAction.DELETE, actor=self._actor)
            self._history.remove(job.name)
        return num_deleted

    @contextlib.contextmanager
    def _stopped(self, name: str, timeout_s: float | None) -> Generator[None]:
        """Stop a job that has not ended, and hold its lock, so that no supervisor can start."""
        try:
            if not self.job(name).state.is_over:
                self.suspend(name, timeout_s=timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error.message}; nothing was deleted",
                hint="the job is being stopped but still exists; when it has stopped, delete it once more",
            ) from error
        deadline_s = clock.monotonic_s() + _EXITS_WITHIN_S
        while True:
            lock = self._lock_of(name)
            if lock is not None and not self.job(name).needs_supervisor:
                break
            if lock is not None:
                lock.release()
            if self.job(name).needs_supervisor or clock.monotonic_s() >= deadline_s:
                raise ConflictError(
                    f"job {name} was stopped, but another command resumed it or still uses it; nothing was deleted",
                    hint=f"see `safepoint status {name}`, then delete the job once more",
                )
            clock.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.release()

    def _remove(self, name: str) -> bool:
        """Remove a job. While it has a supervisor or processes, only request the removal.

        Returns:
            Whether the job was removed.
        """
        lock = self._lock_of(name)
        try:
            self._history.request(name, RequestedAction.DELETE, actor=self._actor)
            job = self._history.find(name)
            if lock is None or job is None or job.state.holds_slots:
                return False
            self._history.remove(name)
            return True
        finally:
            if lock is not None:
                lock.release()

    def _lock_of(self, name: str) -> FolderLock | None:
        """Acquire the lock of a job's supervisor; None while a supervisor holds it, or if the job has no folder."""
        if self._history.knows(name):
            make_private(job_folder(name))
        try:
            return FolderLock.acquire(supervisor_lock(name), {"pid": os.getpid()})
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            raise StorageError(
                f"the folder {job_folder(name)} of job {name} cannot be used: {error.strerror}; nothing was done",
                hint="check its permissions",
            ) from error

    def output_of(self, job: JobRecord) -> str | None:
        """The full output location, from the job's specification or the reports of its ranks; None if unknown."""
        is_given = job.spec.settings.output_dir is not None
        return output_of(job.spec, None if is_given else self.progress_of(job))

    def wait(
        self,
        name: str,
        states: Collection[JobState],
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.2,
        look: Callable[[JobRecord], None] = lambda job: None,
    ) -> JobRecord:
        """Wait until a job is in one of the states. The wait continues while a job is suspended.

        Args:
            name: the name of the job.
            states: the states to wait for.
            timeout_s: how long to wait; None for no limit.
            poll_s: time between two checks.
            look: called at each check.

        Raises:
            SafepointError: the job has failed.
            ConflictError: the job is complete, and COMPLETE is not one of the states.
            WaitTimeoutError: the job did not reach any of the states in time.
        """
        expected = " or ".join(sorted(map(str, states)))

        def has_arrived(job: JobRecord) -> bool:
            look(job)
            if job.state in states or not job.state.is_over:
                return job.state in states
            why = f": {job.message}" if job.message else ""
            if job.state is JobState.FAILED:
                raise SafepointError(f"job {job.name} is Failed{why}", hint=f"see `safepoint logs {job.name}`")
            raise ConflictError(f"job {job.name} is {job.state}, so it cannot become {expected}{why}")

        return self._until(self._history.name_of(name), has_arrived, expected, timeout_s, poll_s)

    def _until(
        self,
        name: str,
        is_done: Callable[[JobRecord], bool],
        what: str,
        timeout_s: float | None,
        poll_s: float = _POLL_S,
    ) -> JobRecord:
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        while True:
            job = self._history.find(name)
            if job is None:
                raise NotFoundError(f"job {name} was deleted before it was {what}")
            if is_done(job):
                return job
            if job.needs_supervisor and not is_locked(supervisor_lock(name)):
                start_supervisor(name)
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise WaitTimeoutError(
                    f"job {name} was not {what} within {timeout_s:g} s; it is {job.state}",
                    hint=f"earlier requests stay in effect; wait again, or see `safepoint logs {name}`",
                )
            clock.sleep(poll_s)
