"""Jobs on this machine."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.errors import ConflictError, UsageError, WaitTimeoutError
from holdfast.foundation import clock
from holdfast.foundation.files import is_locked, write_atomic
from holdfast.jobs import told
from holdfast.jobs.connections import keys_of
from holdfast.jobs.history import History, this_user
from holdfast.jobs.logs import LogLine, read_logs
from holdfast.jobs.outputs import output_of
from holdfast.jobs.places import job_folder, make_private, supervisor_lock
from holdfast.jobs.records import AttemptRecord, JobEvent, JobRecord
from holdfast.jobs.removing import remove_checkpoints, remove_job
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
            return job is None or not job.state.is_active

        yield from read_logs(job_folder(name), ranks=ranks, nodes=nodes, is_over=is_over if follow else None)

    # ---- doing ------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, files: Mapping[str, bytes] | None = None) -> JobRecord:
        """Take a job; it runs as soon as it fits."""
        self._check(spec)
        self._history.add(spec, actor=self._actor)
        try:
            folder = make_private(job_folder(spec.name))
            for file, data in (files or {}).items():
                write_atomic(folder / file, data, durable=True)
            start_supervisor(spec.name)
        except BaseException:
            remove_job(spec.name, self._history)
            raise
        return self.job(spec.name)

    def _check(self, spec: JobSpec) -> None:
        if not Path(spec.working_dir).is_dir():
            raise UsageError(f"there is no folder {spec.working_dir} to run the job in")
        if spec.data_connection is not None:
            keys_of(spec.data_connection)
        _check_devices(spec, count_slots())
        output = spec.settings.output_dir
        for other in self._history.jobs():
            if output is not None and other.state.is_active and _same_place(spec, other.spec):
                raise ConflictError(
                    f"job {other.name} writes to {output} and has not ended",
                    hint="use another output folder, or suspend or delete that job first",
                )

    def suspend(self, name: str, *, timeout_s: float | None = None) -> JobRecord:
        """Stop a job with a checkpoint, and wait for that.

        Raises:
            ConflictError: it has ended.
            WaitTimeoutError: it is still at it; it will be suspended all the same.
        """
        job = self.job(name)
        if job.state.is_over:
            raise ConflictError(f"job {job.name} cannot be suspended: it is {job.state}")
        if job.state is not JobState.SUSPENDED or job.wanted is not Wanted.SUSPEND:
            with self._history.transaction():
                self._history.want(job.name, Wanted.SUSPEND, actor=self._actor)
            revive(self._history)
        return self._until(
            job.name, lambda now: now.state is JobState.SUSPENDED or now.state.is_over, "suspended", timeout_s
        )

    def resume(self, name: str) -> JobRecord:
        """Let a suspended or failed job go on.

        Raises:
            ConflictError: it runs, or is complete.
        """
        with self._history.transaction():
            job = self.job(name)
            if job.state is JobState.COMPLETE:
                raise ConflictError(f"job {job.name} is complete", hint="submit it again to train further")
            if job.state.is_active and job.wanted is Wanted.RUN:
                raise ConflictError(f"job {job.name} is {job.state}, not suspended")
            self._history.want(job.name, Wanted.RUN, actor=self._actor)
            if job.state is JobState.FAILED:
                self._history.become(
                    job.name, JobState.SUSPENDED, actor=self._actor, cause="to be tried again", setbacks=0
                )
        if not is_locked(supervisor_lock(job.name)):
            start_supervisor(job.name)
        return self.job(job.name)

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> JobRecord:
        """Suspend a job, change its number of nodes, and let it go on if it was to run before.

        Raises:
            UsageError: no such number of nodes.
            ConflictError: the job has ended.
        """
        job = self.job(name)
        spec = replace(job.spec, num_nodes=num_nodes)
        if job.state is JobState.COMPLETE:
            raise ConflictError(f"job {job.name} is complete")
        _check_devices(spec, count_slots())
        was_to_run = job.state.is_active and job.wanted is not Wanted.SUSPEND
        if job.state.is_active:
            job = self.suspend(job.name, timeout_s=timeout_s)
        if job.state is JobState.COMPLETE:
            raise ConflictError(f"job {job.name} was complete before it could be scaled")
        with self._history.transaction():
            cause = f"{job.spec.num_nodes} → {num_nodes} nodes"
            self._history.change_spec(spec, actor=self._actor, cause=cause)
        return self.resume(job.name) if was_to_run else self.job(job.name)

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> None:
        """Stop a job and forget it; its checkpoints stay, unless they are asked for too."""
        job = self.job(name)
        output = self.output_of(job)
        if job.state.is_active:
            with self._history.transaction():
                self._history.want(job.name, Wanted.DELETE, actor=self._actor)
            revive(self._history)
            self._until(job.name, lambda _: False, "deleted", timeout_s)
        else:
            remove_job(job.name, self._history)
        if with_checkpoints and output is not None:
            remove_checkpoints(job.spec, output)

    def output_of(self, job: JobRecord) -> str | None:
        """Where a job's checkpoints are: as its owner said, or as its ranks told."""
        return output_of(job.spec, self.progress_of(job))

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

        return self._until(name, is_there, wanted, timeout_s, poll_s)

    def _until(
        self,
        name: str,
        is_there: Callable[[JobRecord], bool],
        what: str,
        timeout_s: float | None,
        poll_s: float = _POLL_S,
    ) -> JobRecord:
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        job = self.job(name)
        while not is_there(job):
            if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                raise WaitTimeoutError(
                    f"job {job.name} was not {what} within {timeout_s:g} s; it is {job.state}",
                    hint="it goes on; wait again, or look at its logs",
                )
            clock.sleep(poll_s)
            found = self._history.find(job.name)
            if found is None:  # it was deleted
                return job
            if found.needs_supervisor and not is_locked(supervisor_lock(job.name)):
                revive(self._history)
            job = found
        return job


def _check_devices(spec: JobSpec, capacity: Slots) -> None:
    wanted = spec.num_nodes * spec.gpu_per_node
    if wanted > capacity.gpu:
        raise UsageError(
            f"the job takes {wanted} gpu, and this machine has {capacity.gpu}", hint="ask for fewer, or for none"
        )


def _same_place(one: JobSpec, other: JobSpec) -> bool:
    places = [
        place if "://" in place else os.path.realpath(os.path.join(spec.working_dir, place))
        for spec in (one, other)
        if (place := spec.settings.output_dir) is not None
    ]
    return len(places) == 2 and places[0] == places[1]


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
