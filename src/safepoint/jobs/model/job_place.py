"""The interface through which commands use jobs. It is the same for this machine and for a cluster."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from safepoint.errors import NotFoundError
from safepoint.foundation.units import most_similar
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress
from safepoint.settings.run_settings import RunSettings


class UnknownJobError(NotFoundError):
    """There is no job of this name. The hint names the job whose name is most similar, if one is similar.

    Args:
        message: what was not found, and what was done about it.
        name: the name that was given.
        known: the names of the jobs that exist.
        hint: how to see these jobs.
    """

    def __init__(self, message: str, *, name: str, known: Collection[str], hint: str) -> None:
        self.similar = most_similar(name.lower(), known)
        """The name of the most similar job; empty if no name is similar."""
        super().__init__(message, hint=f"did you mean {self.similar}? {hint}" if self.similar else hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a job's output.

    Args:
        source: `rank 0`, `node 0` (a launcher or a pod), `packages`, `dataset initializer` or `model initializer`.
        text: the line without its end.
    """

    source: str
    text: str


class Summary(Protocol):
    """A job in a list."""

    @property
    def name(self) -> str:
        """The name of the job, unique in its place."""
        ...

    @property
    def state(self) -> JobState:
        """Its state."""
        ...

    @property
    def message(self) -> str:
        """Why the job is in this state; may be empty."""
        ...

    @property
    def created(self) -> str:
        """When the job was created, RFC 3339 UTC."""
        ...

    @property
    def safe_step(self) -> int | None:
        """The newest step that is known to be committed; None if none is known."""
        ...

    @property
    def command(self) -> str:
        """The program of the job, as a command line."""
        ...


class Job(Summary, Protocol):
    """A job."""

    @property
    def where(self) -> str:
        """The folder, or the cluster and the namespace, in which the job runs."""
        ...

    @property
    def num_nodes(self) -> int:
        """How many nodes the job has."""
        ...

    @property
    def ranks_per_node(self) -> int | None:
        """The number of ranks on each node; None if a runtime of the cluster decides it."""
        ...

    @property
    def attempt(self) -> int:
        """The number of its newest start; 0 before the first."""
        ...

    @property
    def exit_code(self) -> int | None:
        """The exit code of its last attempt; None if there is none."""
        ...

    @property
    def was_saved(self) -> bool | None:
        """Whether its last attempt ended with a checkpoint; None if this is unknown."""
        ...

    @property
    def can_resume(self) -> bool:
        """Whether `resume` can continue the job."""
        ...

    @property
    def can_scale(self) -> bool:
        """Whether `scale` can change its number of nodes."""
        ...

    @property
    def settings(self) -> RunSettings:
        """The options of its run."""
        ...

    @property
    def particulars(self) -> Mapping[str, Any]:
        """The fields that only jobs of this place have, as JSON values."""
        ...


J = TypeVar("J", bound=Job)


@runtime_checkable
class HasDetails(Protocol):
    """A place that can report more about a job than `JobPlace.job` returns. Only `status`, and the page of a job in
    the dashboard, request these details."""

    def details_of(self, job: Any) -> dict[str, Any]:
        """The details, as JSON values."""
        ...

    def progress_in_log(self, job: Any) -> Progress | None:
        """The progress that the output of a job states, for a job without a progress report."""
        ...


class JobPlace(Protocol[J]):
    """The jobs of one place. The methods raise the errors that the methods of `LocalJobs` raise."""

    def summaries(self) -> Sequence[Summary]:
        """All jobs, oldest first, with what a list shows."""
        ...

    def jobs(self) -> list[J]:
        """All jobs, oldest first."""
        ...

    def job(self, name: str) -> J:
        """One job."""
        ...

    def progress_of(self, job: J) -> Progress | None:
        """The last progress report of a job; None before the first one."""
        ...

    def output_of(self, job: J) -> str | None:
        """The output location of a job; None if it is unknown."""
        ...

    def attempts(self, name: str) -> list[AttemptRecord]:
        """The attempts of a job, oldest first, as far as the place keeps them."""
        ...

    def events(self, name: str) -> list[JobEvent]:
        """The events of a job, oldest first."""
        ...

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        last_bytes: int | None = None,
    ) -> Iterator[LogLine]:
        """The output of a job, of one rank, or of one node.

        If `follow` is set, this also yields new lines until the job has stopped. If `last_bytes` is set, this yields
        only about this many bytes at the end of the output of each process.
        """
        ...

    def watch(self, name: str | None, *, interval_s: float) -> Iterator[list[J]]:
        """Yield the active jobs, or one job, repeatedly. A job that has ended is yielded once more.

        Args:
            name: the job; None for all active jobs. With a name, the iterator ends when the job has stopped.
            interval_s: the minimum time between two lists.
        """
        ...

    def suspend(self, name: str, *, timeout_s: float | None = None) -> J:
        """Save a checkpoint and stop a job, and wait until it is suspended."""
        ...

    def resume(self, name: str) -> J:
        """Continue a suspended or failed job."""
        ...

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> J:
        """Change a job's number of nodes. A running job is saved, stopped and started again."""
        ...

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> int:
        """Stop a job and remove it; returns the number of deleted checkpoints."""
        ...

    def remark_on(self, job: J) -> str:
        """A warning about the size of a job; may be empty."""
        ...
