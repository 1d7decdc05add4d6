"""The jobs of all places. Each place is read on a thread of its own. This machine is read again only after a change.

Promises: the values are frozen. A place that cannot be reached has a message instead of jobs, and does not delay
other places. Nothing is read unless a page or `Live` asks for it.
"""

import contextlib
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from safepoint.answers.situation import Attention, attention_of
from safepoint.errors import NotFoundError, SafepointError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.job_place import Job, JobPlace
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.planning.costs import JobHistory
from safepoint.progress.metric_history import MetricPoint, MetricReader, current_points, read_points, with_report
from safepoint.progress.record import Progress

OpenJobs = Callable[[str], contextlib.AbstractContextManager[JobPlace[Any]]]
"""Opens the jobs of a place. The argument is the name that events state for the user who changes these jobs."""
_READER = "dashboard"
_FRESH_S = 0.2
"""How old a list of this machine may be when a page shows it, in seconds."""
_FRESH_ON_CLUSTER_S = 3.0
_OLDEST_ON_CLUSTER_S = 15.0
"""If the list of a cluster is not older than this, a page does not wait for a newer one."""
_BUSY_SHARE, _MOST_PAUSE_S = 4, 2.0
"""After a read of t seconds, the next read begins after a pause of (`_BUSY_SHARE` - 1)·t, at most `_MOST_PAUSE_S`."""
_ANSWER_WITHIN_S = 30.0
_SPARKLINE_BYTES = 16 << 10
_EVENTS_BYTES = 8 << 20
"""The limit of bytes at the end of a job's events that are read. They hold more than 20,000 events."""
_MOST_KEPT = 16
"""The limit of jobs whose events and metrics stay in memory."""
_CHANGES_WITH_TIME = (JobState.RUNNING, JobState.PREEMPTED)
"""In these states, a job can need attention only because time has passed."""
_ATTENTION_EVERY_S = 5.0
"""How often the dashboard checks whether a job needs attention because time has passed."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    """A job of a list.

    Args:
        place: the key of its place.
        job: the job.
        progress: its last report; None if there is none.
        attention: why it needs attention.
        mark: a value that changes when the ranks of the job report something.
    """

    place: str
    job: Job
    progress: Progress | None
    attention: Attention
    mark: object

    @property
    def key(self) -> str:
        """The place and the name of the job."""
        return f"{self.place}/{self.job.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceJobs:
    """The result of reading a place.

    Args:
        jobs: name → job, oldest first.
        failure: why the place could not be read; empty if it was read.
        read_s: when it was read, on the monotonic clock.
    """

    jobs: Mapping[str, ListedJob] = field(default_factory=dict[str, ListedJob])
    failure: str = ""
    read_s: float = float("-inf")


class PlaceReader:
    """The jobs of one place.

    Args:
        name: as the option `--on` names it; `local` for this machine.
        open_jobs: opens its jobs; called on the thread of this reader.
    """

    def __init__(self, name: str, open_jobs: OpenJobs) -> None:
        self.name = name
        self.key = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-") or "place"
        self.open_jobs = open_jobs
        # SQLite allows a connection on one thread only.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"safepoint-{self.key}")
        self._exit = contextlib.ExitStack()
        self._jobs: JobPlace[Any] | None = None
        self._now = PlaceJobs()
        self._live: list[ListedJob] = []
        """The jobs that have processes. The processes may report."""
        self._number: int | None = None
        self._again_s = 0.0
        self._is_expired = False
        self._losses: dict[str, tuple[object, tuple[float, ...]]] = {}
        self._observed: dict[str, list[MetricPoint]] = {}
        self.histories: dict[str, tuple[object, tuple[list[AttemptRecord], JobHistory]]] = {}
        """What the page of costs has read, for each job."""
        self._events: dict[str, tuple[object, tuple[JobEvent, ...]]] = {}
        self._readers: dict[str, MetricReader] = {}
        self._attention_s = float("-inf")
        self._keeping = threading.Lock()

    @property
    def is_local(self) -> bool:
        """Whether it is this machine."""
        return self.name == "local"

    def read(self, *, waits: bool = False) -> PlaceJobs:
        """The jobs, read again if they may have changed.

        Args:
            waits: whether to wait for a newer list of a cluster. If not, the list may be up to 15 seconds old.
        """
        age_s = clock.monotonic_s() - self._now.read_s
        if self._is_expired or age_s > (self._fresh_s if waits or self.is_local else _OLDEST_ON_CLUSTER_S):
            self._on_thread(self._refresh)
        elif age_s > self._fresh_s:
            with contextlib.suppress(RuntimeError):  # the dashboard ends
                self._thread.submit(self._refresh)
        return self._now

    @property
    def _fresh_s(self) -> float:
        return _FRESH_S if self.is_local else _FRESH_ON_CLUSTER_S

    def expire(self) -> None:
        """Read the jobs again before the next page, because an action has changed a job."""
        self._is_expired = True

    def job(self, name: str) -> ListedJob:
        """One job, by its full name.

        Raises:
            NotFoundError: the place has no such job.
            SafepointError: the place cannot be read.
        """
        found = self.read()
        job = found.jobs.get(name)
        if job is None:  # the job may have been submitted a moment ago
            self._on_thread(self._refresh_now)
            found = self._now
            job = found.jobs.get(name)
        if job is None:
            if found.failure:
                raise SafepointError(found.failure)
            raise NotFoundError(f"there is no job {name!r} in {self.title}", hint="it may have been deleted")
        return job

    def call(self, ask: Callable[[JobPlace[Any]], _T]) -> _T:
        """Call a function with the jobs of the place. The function must not take longer than a read of the jobs.

        Raises:
            SafepointError: the place cannot be read, or does not answer in time.
        """
        return self._on_thread(lambda: ask(self._opened()))

    def losses(self, listed: ListedJob) -> tuple[float, ...]:
        """The latest losses of a job, oldest first, for a small curve."""
        before = self._losses.get(listed.job.name)
        if before is None or before[0] != listed.mark:
            points = self.points(listed, last_bytes=_SPARKLINE_BYTES)
            found = tuple(point.values["loss"] for point in points[-60:] if "loss" in point.values)
            self._losses[listed.job.name] = before = (listed.mark, found)
        return before[1]

    def points(self, listed: ListedJob, *, last_bytes: int | None = None) -> list[MetricPoint]:
        """The metrics of a job over its steps. On a cluster, only reports that this reader has seen count."""
        name = listed.job.name
        if not self.is_local:  # a page need not wait until the thread has read the cluster
            return current_points([*self._observed.get(name, ())])

        def ask(jobs: JobPlace[Any]) -> list[MetricPoint]:
            path = cast("LocalJobs", jobs).metrics_file(name)
            return self._metrics(name, path) if last_bytes is None else read_points(path, last_bytes=last_bytes)

        return current_points(self.call(ask))

    def events(self, listed: ListedJob) -> tuple[JobEvent, ...]:
        """The newest events of a job, oldest first. On this machine, they are read again only after a change."""
        name = listed.job.name

        def ask(jobs: JobPlace[Any]) -> list[JobEvent]:
            return jobs.events(name, last_bytes=_EVENTS_BYTES) if isinstance(jobs, LocalJobs) else jobs.events(name)

        mark = (listed.job, listed.mark)
        before = self._events.get(name)
        if before is None or before[0] != mark or not self.is_local:
            before = (mark, tuple(self.call(ask)))
            with self._keeping:
                self._events.pop(name, None)
                self._events[name] = before
                if len(self._events) > _MOST_KEPT:
                    del self._events[next(iter(self._events))]
        return before[1]

    def _metrics(self, name: str, path: Path) -> list[MetricPoint]:
        reader = self._readers.pop(name, None) or MetricReader(path)
        self._readers[name] = reader
        if len(self._readers) > _MOST_KEPT:
            del self._readers[next(iter(self._readers))]
        return reader.read()

    @property
    def title(self) -> str:
        """The name of the place, for people."""
        return "this machine" if self.is_local else self.name

    @property
    def option(self) -> str:
        """The option that names the place in a command, after a space; empty for this machine."""
        return "" if self.is_local else f" --on {shlex.quote(self.name)}"

    def close(self) -> None:
        """End the thread, without waiting for a running request."""
        self._thread.submit(self._exit.close)
        self._thread.shutdown(wait=False)

    def _on_thread(self, task: Callable[[], _T]) -> _T:
        try:
            future = self._thread.submit(task)
        except RuntimeError as error:
            raise SafepointError("the dashboard ends; nothing was read") from error
        try:
            return future.result(_ANSWER_WITHIN_S)
        except FutureTimeoutError:
            future.cancel()
            raise WaitTimeoutError(
                f"{self.title} did not answer within {_ANSWER_WITHIN_S:g} s", hint="load the page again later"
            ) from None

    def _opened(self) -> JobPlace[Any]:
        if self._jobs is None:
            self._jobs = self._exit.enter_context(self.open_jobs(_READER))
        return self._jobs

    def _refresh_now(self) -> None:
        self.expire()
        self._refresh()

    def _refresh(self) -> None:
        now_s = clock.monotonic_s()
        is_expired, self._is_expired = self._is_expired, False
        if not is_expired and now_s - self._now.read_s < self._fresh_s:
            return  # another request was first
        try:
            jobs = self._opened()
            changed = self._has_changed(jobs) if is_expired or now_s >= self._again_s else False
            if isinstance(jobs, LocalJobs) and not changed and not self._has_news(jobs):
                self._now = replace(self._now, read_s=now_s)
            elif changed or isinstance(jobs, LocalJobs):
                listed = jobs.jobs() if changed else [one.job for one in self._now.jobs.values()]
                found = self._listed(jobs, listed)
                if changed:
                    self._forget_all_but(found)
                self._now = PlaceJobs(jobs=found, read_s=now_s)
            if changed:
                took_s = clock.monotonic_s() - now_s
                self._again_s = now_s + took_s + min((_BUSY_SHARE - 1) * took_s, _MOST_PAUSE_S)
        except SafepointError as error:
            self._number, self._jobs = None, None
            self._exit.close()
            self._now, self._live = PlaceJobs(failure=str(error), read_s=now_s), []

    def _forget_all_but(self, found: Mapping[str, ListedJob]) -> None:
        """Delete what was read of jobs that no longer exist."""
        kept: tuple[dict[str, Any], ...] = (self._losses, self._observed, self.histories)
        for known in kept:
            for name in [name for name in list(known) if name not in found]:
                known.pop(name, None)

    def _has_changed(self, jobs: JobPlace[Any]) -> bool:
        if not isinstance(jobs, LocalJobs):
            return True
        number = jobs.change_number()
        if number == self._number:
            return False
        self._number = number
        return True

    def _has_news(self, jobs: LocalJobs) -> bool:
        """Whether a rank has reported something, or a job may need attention because time has passed."""
        return self._is_new_time or any(jobs.report_mark(one.job.name) != one.mark for one in self._live)

    @property
    def _is_new_time(self) -> bool:
        return clock.monotonic_s() - self._attention_s > _ATTENTION_EVERY_S

    def _listed(self, jobs: JobPlace[Any], found: Iterable[Any]) -> dict[str, ListedJob]:
        before = self._now.jobs
        listed: dict[str, ListedJob] = {}
        is_new_time = self._is_new_time
        if is_new_time:
            self._attention_s = clock.monotonic_s()
        for job in found:
            old = before.get(job.name)
            is_live = job.state.holds_slots or old is None or old.job is not job
            mark = old.mark if old is not None else None
            if is_live and isinstance(jobs, LocalJobs):
                mark = jobs.report_mark(job.name)
            is_looked_at = is_new_time and job.state in _CHANGES_WITH_TIME
            if old is not None and old.job is job and old.mark == mark and not is_looked_at:
                listed[job.name] = old
                continue
            if old is not None and old.job == job and old.mark == mark and isinstance(jobs, LocalJobs):
                progress = old.progress
            else:
                progress = jobs.progress_of(job)
                mark = mark if isinstance(jobs, LocalJobs) else progress
                self._observe(job.name, progress, jobs)
            changed = job.particulars.get("changed")
            listed[job.name] = ListedJob(
                place=self.key,
                job=job,
                progress=progress,
                attention=attention_of(job, progress, changed=changed if isinstance(changed, str) else None),
                mark=mark,
            )
        self._live = [one for one in listed.values() if one.job.state.holds_slots]
        return listed

    def _observe(self, name: str, progress: Progress | None, jobs: JobPlace[Any]) -> None:
        if progress is not None and not isinstance(jobs, LocalJobs):
            self._observed[name] = with_report(self._observed.get(name, []), progress)


class Places:
    """All places of a dashboard.

    Args:
        openers: the name of each place in `--on` → a function that opens the jobs of this place.
    """

    def __init__(self, openers: Mapping[str, OpenJobs]) -> None:
        self.readers: dict[str, PlaceReader] = {}
        self._lock = threading.Lock()
        for name, open_jobs in openers.items():
            reader = PlaceReader(name, open_jobs)
            while reader.key in self.readers:
                reader.key += "-2"
            self.readers[reader.key] = reader

    def reader(self, key: str) -> PlaceReader:
        """The reader of a place.

        Raises:
            NotFoundError: there is no such place.
        """
        if key not in self.readers:
            raise NotFoundError(f"this dashboard shows no place {key!r}", hint="see the list of jobs")
        return self.readers[key]

    def close(self) -> None:
        """End all threads."""
        for reader in self.readers.values():
            reader.close()
