"""Jobs on this machine."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.errors import ConflictError, NotFoundError, StorageError, UsageError, WaitTimeoutError
from holdfast.foundation import clock
from holdfast.foundation.files import FolderLock, is_locked, write_atomic
from holdfast.jobs import told
from holdfast.jobs.connections import connected, keys_of
from holdfast.jobs.history import History, this_user
from holdfast.jobs.logs import LogLine, read_logs
from holdfast.jobs.output_location import output_of
from holdfast.jobs.places import job_folder, make_private, new_job_folder, supervisor_lock
from holdfast.jobs.records import AttemptRecord, JobEvent, JobRecord
from holdfast.jobs.removing import remove_job, remove_remains
from holdfast.jobs.reviving import revive, start_supervisor
from holdfast.jobs.slots import Slots, count_slots
from holdfast.jobs.spec import JobSpec
from holdfast.jobs.state import JobState, Wanted
from holdfast.training.progress import Progress

_POLL_S = 0.1


class LocalJobs:
    """The jobs of this user on this machine; keeps the Protocol `backend.Jobs`.

    Whoever opens it also revives: jobs whose supervisor was killed get a new one.

    Args:
        actor: who acts, for the history.
    """

    def __init__(self, *, actor: str | None = None) -> None:
        self._actor = actor or this_user()
        self._history = History()
        with contextlib.suppress(ConflictError):
            revive(self._history)

    def close(self) -> None:
        """Let go of the history."""
        self._history.close()

    def __enter__(self) -> "LocalJobs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- looking ----------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobRecord]:
        """All jobs, oldest first."""
        return self._history.jobs()

    def job(self, name: str) -> JobRecord:
        """One job, by its name or the beginning of it."""
        return self._history.job(name)

    def attempts(self, name: str) -> list[AttemptRecord]:
        """Its starts, oldest first."""
        return self._history.attempts(self.job(name).name)

    def events(self, name: str) -> list[JobEvent]:
        """What people, supervisors and ranks did, in the order of time."""
        name = self.job(name).name
        happened = self._history.events(name)
        happened += [_as_job_event(event) for event in told.events(job_folder(name))]
        return sorted(happened, key=lambda event: event.time)

    def progress(self, name: str) -> Progress | None:
        """What the first rank told last."""
        return told.progress(job_folder(self.job(name).name))

    def progress_of(self, job: JobRecord) -> Progress | None:
        """Likewise, of a job that was looked up a moment ago."""
        return told.progress(job_folder(job.name))

    def folder(self, name: str) -> Path:
        """Where the job's own files are."""
        return job_folder(name)

    def logs(
        self, name: str, *, ranks: range | None = None, nodes: range | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """What the job has printed."""
        name = self.job(name).name

        def is_over() -> bool:
            job = self._history.find(name)
            return job is None or not job.needs_supervisor

        yield from read_logs(job_folder(name), ranks=ranks, nodes=nodes, is_over=is_over if follow else None)

    # ---- doing ------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, files: Mapping[str, bytes] | None = None) -> JobRecord:
        """Take a job; it runs as soon as it fits."""
        if not Path(spec.working_dir).is_dir():
            raise UsageError(f"there is no folder {spec.working_dir} to run the job in")
        if spec.data_connection is not None:
            keys_of(spec.data_connection)
        _check_devices(spec, count_slots())
        if spec.settings.output_dir is not None:
            _check_place(spec.settings.output_dir, spec)
        new = make_private(new_job_folder())
        try:
            for file, data in (files or {}).items():
                write_atomic(new / file, data, durable=True)
            self._make_known(spec, new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        try:
            start_supervisor(spec.name)
        except BaseException:
            self._remove(spec.name)
            raise
        return self.job(spec.name)

    def _make_known(self, spec: JobSpec, new: Path) -> None:
        """Write the job down and give its folder its name; whoever sees the job may start its supervisor at once."""
        with self._history.transaction():
            self._refuse_taken_place(spec.name, output_of(spec, None))
            self._history.add(spec, actor=self._actor)
            if is_locked(supervisor_lock(spec.name)):
                raise ConflictError(
                    f"a job {spec.name!r} of an earlier history still runs here",
                    hint="choose another name, or end its processes first",
                )
            shutil.rmtree(job_folder(spec.name), ignore_errors=True)
            new.rename(job_folder(spec.name))

    def _refuse_taken_place(self, name: str, output: str | None) -> None:
        """Two trainings into one folder would spoil each other's; the second one is refused before it begins."""
        for other in self._others_at(output, but=name):
            if other.needs_supervisor:
                raise ConflictError(
                    f"job {other.name} writes to {output} and has not ended",
                    hint="use another output folder, or suspend or delete that job first",
                )

    def _others_at(self, output: str | None, *, but: str) -> list[JobRecord]:
        if output is None:
            return []
        return [
            other for other in self._history.unfinished() if other.name != but and self.output_of(other) == output
        ]

    def _ask(self, job: JobRecord, wanted: Wanted) -> None:
        if job.wanted is Wanted.DELETE:
            raise ConflictError(f"job {job.name} is being deleted")
        self._history.want(job.name, wanted, actor=self._actor)

    def suspend(self, name: str, *, timeout_s: float | None = None) -> JobRecord:
        """Stop a job with a checkpoint, and wait for that.

        Raises:
            ConflictError: it has ended.
            WaitTimeoutError: it is still at it; it will be suspended all the same.
        """
        with self._history.transaction():
            job = self.job(name)
            if job.state.is_over:
                raise ConflictError(f"job {job.name} cannot be suspended: it is {job.state}")
            if job.state is not JobState.SUSPENDED or job.wanted is not Wanted.SUSPEND:
                self._ask(job, Wanted.SUSPEND)

        def has_stopped(job: JobRecord) -> bool:
            if job.state.is_over or (job.state is JobState.SUSPENDED and job.wanted is Wanted.SUSPEND):
                return True
            if job.wanted is not Wanted.SUSPEND:
                raise ConflictError(f"job {job.name} was to be suspended, and somebody else wants it to {job.wanted}")
            return False

        return self._until(job.name, has_stopped, "suspended", timeout_s)

    def resume(self, name: str) -> JobRecord:
        """Let a suspended or failed job go on.

        Raises:
            ConflictError: it runs, is complete, is being deleted, or another job writes where it does.
        """
        with self._history.transaction():
            job = self.job(name)
            if job.state is JobState.COMPLETE:
                raise ConflictError(f"job {job.name} is complete", hint="submit it again to train further")
            if job.state.is_active and job.wanted in {Wanted.RUN, Wanted.PREEMPT}:
                raise ConflictError(f"job {job.name} is {job.state}, not suspended")
            self._refuse_taken_place(job.name, self.output_of(job))
            self._ask(job, Wanted.RUN)
            if not job.state.is_active:
                cause = "to be tried again" if job.state is JobState.FAILED else ""
                self._history.become(job.name, JobState.QUEUED, actor=self._actor, cause=cause, setbacks=0)
        if not is_locked(supervisor_lock(job.name)):
            start_supervisor(job.name)
        return self.job(job.name)

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> JobRecord:
        """Change a job's number of nodes; one that runs is stopped for it with a checkpoint, and goes on.

        The supervisor does all of it: nothing is left undone when the caller is killed or waits no longer.

        Raises:
            UsageError: no such number of nodes.
            ConflictError: the job is complete, or ended before it could be changed.
            WaitTimeoutError: it is still at it; it will have them all the same.
        """
        with self._history.transaction():
            job = self.job(name)
            spec = replace(job.spec, num_nodes=num_nodes)
            if job.state is JobState.COMPLETE:
                raise ConflictError(f"job {job.name} is complete")
            if job.wanted is Wanted.DELETE:
                raise ConflictError(f"job {job.name} is being deleted")
            _check_devices(spec, count_slots())
            if num_nodes != (job.target_nodes or job.spec.num_nodes):
                change = self._history.want_nodes if job.state.holds_slots else self._history.change_nodes
                change(job, num_nodes, actor=self._actor)
        what = f"scaled to {num_nodes} nodes"
        job = self._until(job.name, lambda job: job.target_nodes is None, what, timeout_s)
        if job.spec.num_nodes != num_nodes:
            why = f": {job.message}" if job.message else ""
            raise ConflictError(f"job {job.name} was {job.state} before it could be {what}{why}")
        return job

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> None:
        """Stop a job and forget it; its checkpoints stay, unless they are asked for too.

        Raises:
            ConflictError: its checkpoints are asked for too, and another job is to go on with them; nothing was done.
        """
        name = self._history.name_of(name)
        try:
            job = self.job(name)
        except StorageError:  # its entry cannot be read, and there is no other way to be rid of it
            self._history.forget(name)
            remove_remains(name, self._history)
            return
        output = self.output_of(job)
        others = [other.name for other in self._others_at(output, but=name) if not other.state.is_over]
        if with_checkpoints and others:
            raise ConflictError(
                f"the checkpoints in {output} are those of job {', '.join(others)} too; nothing was deleted",
                hint=f"delete that job first, or {name} without its checkpoints",
            )
        if not self._remove(name):
            with contextlib.suppress(NotFoundError):  # which is what is waited for
                self._until(name, lambda _: False, "deleted", timeout_s)
        if with_checkpoints and output is not None:
            from holdfast.jobs.outputs import remove_checkpoints  # the stores' library, which no other command needs

            remove_checkpoints(output, job.spec)

    def _remove(self, name: str) -> bool:
        """Remove a job here and now; where it has a supervisor or processes, only ask for it, and say False."""
        self._history.want(name, Wanted.DELETE, actor=self._actor)
        try:
            lock = FolderLock.acquire(supervisor_lock(name), {"pid": os.getpid()})
        except (BlockingIOError, FileNotFoundError):
            return False
        job = self._history.find(name)
        is_idle = job is not None and not job.state.holds_slots
        if is_idle:
            remove_job(name, self._history)
        if lock is not None:
            lock.release()
        return is_idle

    def output_of(self, job: JobRecord) -> str | None:
        """Where a job's checkpoints are, in full: as its owner said, or as its ranks told."""
        is_said = job.spec.settings.output_dir is not None
        return output_of(job.spec, None if is_said else self.progress_of(job))

    def wait(
        self,
        name: str,
        states: Collection[JobState],
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.2,
        watch: Sequence[Callable[[JobRecord], None]] = (),
    ) -> JobRecord:
        """Until a job is in one of the states.

        Raises:
            ConflictError: it has come to a state that it will not leave by itself.
            WaitTimeoutError: it took longer.
        """
        wanted = ", ".join(sorted(map(str, states)))

        def is_there(job: JobRecord) -> bool:
            for callback in watch:
                callback(job)
            if job.state not in states and not job.needs_supervisor:
                why = f": {job.message}" if job.message else ""
                raise ConflictError(f"job {job.name} is {job.state}, and was waited for to be {wanted}{why}")
            return job.state in states

        return self._until(self._history.name_of(name), is_there, wanted, timeout_s, poll_s)

    def _until(
        self,
        name: str,
        is_there: Callable[[JobRecord], bool],
        what: str,
        timeout_s: float | None,
        poll_s: float = _POLL_S,
    ) -> JobRecord:
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        while True:
            job = self._history.find(name)
            if job is None:
                raise NotFoundError(f"job {name} was deleted while it was waited for to be {what}")
            if is_there(job):
                return job
            if job.needs_supervisor and not is_locked(supervisor_lock(name)):
                start_supervisor(name)
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise WaitTimeoutError(
                    f"job {name} was not {what} within {timeout_s:g} s; it is {job.state}",
                    hint="it goes on; wait again, or look at its logs",
                )
            clock.sleep(poll_s)


def _check_devices(spec: JobSpec, capacity: Slots) -> None:
    wanted = spec.num_nodes * spec.gpu_per_node
    if wanted > capacity.gpu:
        raise UsageError(
            f"the job takes {wanted} gpu, and this machine has {capacity.gpu}", hint="ask for fewer, or for none"
        )


def _check_place(output: str, spec: JobSpec) -> None:
    """That an object store can be used is better known now than when the ranks have started."""
    from holdfast.training.output_place import place_output
    from holdfast.training.store_access import open_tried

    with connected(spec.data_connection, spec.env):
        place = place_output(output, local_dir=spec.settings.local_dir)
        if place.remote is not None:
            open_tried(place.remote, verify_access=spec.settings.verify_access)


def _as_job_event(record: dict[str, Any]) -> JobEvent:
    known = {"time", "event", "actor", "cause", "trigger"}
    return JobEvent(
        time=str(record.get("time", "")),
        name=str(record["event"]),
        actor=str(record.get("actor", "rank 0")),
        cause=str(record.get("cause") or record.get("trigger") or record.get("reason") or ""),
        detail={key: value for key, value in record.items() if key not in known},
    )


__all__ = ["LocalJobs"]
