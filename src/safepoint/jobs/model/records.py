"""What the history says of a job: values, as they were when they were read."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from safepoint.errors import ExitCode
from safepoint.foundation.processes import ProcessId
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.state import JobState, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job.

    Args:
        name: unique.
        spec: what it is to do.
        state: what it is.
        wanted: what is wanted of it.
        created: RFC 3339 UTC.
        changed: when `state` last changed.
        message: why it is what it is, for people; empty where the state says all.
        exit_code: of its last attempt; None before it has ended.
        attempt: how many there were.
        safe_step: the newest step known to be committed.
        setbacks: how often it was interrupted from outside without a step of progress between.
        target_nodes: how many nodes it is to have when its launchers have stopped for it; None for as many as now.
    """

    name: str
    spec: JobSpec
    state: JobState
    wanted: Wanted
    created: str
    changed: str
    message: str = ""
    exit_code: int | None = None
    attempt: int = 0
    safe_step: int | None = None
    setbacks: int = 0
    target_nodes: int | None = None

    @property
    def needs_supervisor(self) -> bool:
        """Whether there must be a process that looks after it."""
        if self.wanted is Wanted.DELETE or self.state.is_active:
            return True
        return self.state is JobState.SUSPENDED and self.wanted is Wanted.RUN

    @property
    def is_to_stop(self) -> bool:
        """Whether its launchers are to stop, for good or to be started again in another number."""
        return self.wanted is not Wanted.RUN or self.target_nodes is not None

    @property
    def was_saved(self) -> bool:
        """Whether its last attempt has left with a checkpoint; a job that never ran has lost nothing either."""
        return self.attempt == 0 or self.exit_code == ExitCode.INTERRUPTED_SAVED

    @property
    def cpu(self) -> int:
        """Slots that it takes."""
        return self.spec.num_nodes * self.spec.cpu_per_node

    @property
    def gpu(self) -> int:
        """Devices that it takes."""
        return self.spec.num_nodes * self.spec.gpu_per_node

    @property
    def command(self) -> str:
        """What it runs, as a person would type it."""
        return as_typed(self.spec.program, is_module=self.spec.is_module)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What a list of many jobs says of one; most of its specification is not looked at for that.

    Args:
        name: unique.
        state: what it is.
        created: RFC 3339 UTC.
        safe_step: the newest step known to be committed.
        command: what it runs, as a person would type it.
    """

    name: str
    state: JobState
    created: str
    safe_step: int | None
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of a job.

    Args:
        number: from 1.
        num_nodes: how many launchers it had.
        started: RFC 3339 UTC.
        ended: likewise; None while it runs.
        outcome: the state that the job came to by it, and why.
        exit_code: what its launchers' exit codes come to.
    """

    number: int
    num_nodes: int
    started: str
    ended: str | None = None
    outcome: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One launcher of an attempt.

    Args:
        node: its number, from 0.
        process: who it is.
        gpus: the devices that it sees, as CUDA_VISIBLE_DEVICES names them.
    """

    node: int
    process: ProcessId
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that a person or a supervisor did to a job.

    Args:
        time: RFC 3339 UTC.
        name: what: `submitted`, `suspend_requested`, `started`, …
        actor: who did it.
        cause: why, for people.
        detail: figures, by name.
    """

    time: str
    name: str
    actor: str
    cause: str
    detail: dict[str, Any]


def as_typed(program: Iterable[str], *, is_module: bool) -> str:
    """Script and arguments, or module and arguments, as a person would type them behind `python`."""
    return shlex.join((*(["-m"] if is_module else []), *program))
