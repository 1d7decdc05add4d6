"""What can be done with jobs, wherever they run: the Protocol that commands and the SDK use."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from holdfast.jobs.logs import LogLine
from holdfast.jobs.records import AttemptRecord, JobEvent, JobRecord
from holdfast.jobs.spec import JobSpec
from holdfast.jobs.state import JobState
from holdfast.training.progress import Progress


class Jobs(Protocol):
    """Jobs in one place. A name may be the beginning of one, as long as it fits one job only.

    Every method raises NotFoundError for a job that is not there, ConflictError for what its state does not allow,
    and StorageError when the place that keeps the jobs cannot be used.
    """

    def submit(self, spec: JobSpec, files: Mapping[str, bytes] | None = None) -> JobRecord:
        """Take a job; it runs as soon as it fits.

        Args:
            spec: what it is to do. Its program may name files in `folder(spec.name)`.
            files: what to put there, by name.
        """
        ...

    def jobs(self) -> list[JobRecord]:
        """All jobs, oldest first."""
        ...

    def job(self, name: str) -> JobRecord:
        """One job."""
        ...

    def attempts(self, name: str) -> list[AttemptRecord]:
        """Its starts, oldest first."""
        ...

    def events(self, name: str) -> list[JobEvent]:
        """What people, supervisors and ranks did, in the order of time."""
        ...

    def progress(self, name: str) -> Progress | None:
        """What its first rank told last (docs/progress.md); None before it has told anything."""
        ...

    def logs(
        self, name: str, *, ranks: range | None = None, nodes: range | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """What it has printed; with `follow`, until it has no processes and will have none by itself."""
        ...

    def suspend(self, name: str, *, timeout_s: float | None = None) -> JobRecord:
        """Stop it with a checkpoint, and wait for that."""
        ...

    def resume(self, name: str) -> JobRecord:
        """Let a suspended or failed job go on."""
        ...

    def scale(self, name: str, num_nodes: int, *, timeout_s: float | None = None) -> JobRecord:
        """Suspend it, change its number of nodes, and let it go on as before."""
        ...

    def delete(self, name: str, *, with_checkpoints: bool = False, timeout_s: float | None = None) -> None:
        """Stop it and forget it; its checkpoints stay, unless they are asked for too."""
        ...

    def wait(
        self,
        name: str,
        states: Collection[JobState],
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.2,
        watch: Sequence[Callable[[JobRecord], None]] = (),
    ) -> JobRecord:
        """Until it is in one of the states.

        Raises:
            ConflictError: it has ended in another one, or is suspended and will not get there.
            WaitTimeoutError: it took longer.
        """
        ...


__all__ = ["Jobs"]
