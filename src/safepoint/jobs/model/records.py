"""The records of the history: jobs with their states, attempts, launchers and events."""

import enum
import getpass
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from safepoint.errors import ExitCode
from safepoint.foundation.environment import host_name
from safepoint.foundation.processes import ProcessId
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings


class RequestedAction(enum.StrEnum):
    """The action that is requested for a job.

    Commands and the supervisors of other jobs store it, and the job's own supervisor carries it out.
    """

    RUN = "run"
    SUSPEND = "suspend"
    PREEMPT = "preempt"
    FREEZE = "freeze"
    """The processes are in an image and end now."""
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job.

    Args:
        name: unique.
        spec: its specification.
        state: its state.
        wanted: the requested action.
        created: RFC 3339 UTC.
        changed: when `state` or `message` was last stored, RFC 3339 UTC.
        message: why it is in this state; may be empty.
        exit_code: the exit code of the last attempt that has ended; None if no attempt has ended, or if the launchers
            of this attempt were killed.
        attempt: the number of its newest attempt; 0 before the first.
        safe_step: the newest step known to be committed.
        setbacks: the number of consecutive interruptions without progress that were not requested.
        target_nodes: a number of nodes that was requested and is not in effect yet; None if no number was requested.
        image: the absolute path or the URI of the newest process image of its newest attempt; None if there is none.
        from_checkpoint: whether its next start must be from a checkpoint, even if an image is newer. The image may be
            made later, if the job is still being suspended.
    """

    name: str
    spec: JobSpec
    state: JobState
    wanted: RequestedAction
    created: str
    changed: str
    message: str = ""
    exit_code: int | None = None
    attempt: int = 0
    safe_step: int | None = None
    setbacks: int = 0
    target_nodes: int | None = None
    image: str | None = None
    from_checkpoint: bool = False

    @property
    def needs_supervisor(self) -> bool:
        """Whether a supervisor must run for the job."""
        if self.wanted is RequestedAction.DELETE or self.state.is_active:
            return True
        return self.state is JobState.SUSPENDED and self.wanted is RequestedAction.RUN

    @property
    def is_to_stop(self) -> bool:
        """Whether its launchers have to stop: permanently, or to start again with another number of nodes."""
        return self.wanted is not RequestedAction.RUN or self.target_nodes is not None

    @property
    def can_resume(self) -> bool:
        """Whether `resume` can continue the job: True for a suspended or a failed job."""
        return self.state in {JobState.SUSPENDED, JobState.FAILED}

    @property
    def is_thawed(self) -> bool:
        """Whether its processes were restored from an image, and have reported no progress yet."""
        return self.state is JobState.RESUMING and self.image is not None

    @property
    def can_scale(self) -> bool:
        """Whether `scale` can change its number of nodes: True unless the job is complete."""
        return self.state is not JobState.COMPLETE

    @property
    def was_saved(self) -> bool:
        """Whether its last attempt ended with a checkpoint or an image. True also for a job that never ran."""
        return self.attempt == 0 or self.exit_code == ExitCode.INTERRUPTED_SAVED

    @property
    def command(self) -> str:
        """Its program, as a command line."""
        return command_line(self.spec.program, is_module=self.spec.is_module)

    @property
    def where(self) -> str:
        """The folder in which the job runs."""
        return self.spec.working_dir

    @property
    def num_nodes(self) -> int:
        """How many launchers the job has."""
        return self.spec.num_nodes

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.spec.ranks_per_node

    @property
    def settings(self) -> RunSettings:
        """The options of its run."""
        return self.spec.settings

    @property
    def particulars(self) -> dict[str, Any]:
        """The fields that only jobs of this machine have, as JSON values; see docs/jobs.md."""
        spec = self.spec
        return {
            "wanted": str(self.wanted),
            "working_dir": spec.working_dir,
            "cpu_per_node": spec.cpu_per_node,
            "gpu_per_node": spec.gpu_per_node,
            "priority": spec.priority,
            "grace_s": spec.settings.grace_s,
            "changed": self.changed,
            "image": self.image,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job in a list; most of its specification is not parsed.

    Args:
        name: unique.
        state: its state.
        message: why it is in this state; may be empty.
        created: RFC 3339 UTC.
        safe_step: the newest step known to be committed.
        command: its program, as a command line.
    """

    name: str
    state: JobState
    message: str
    created: str
    safe_step: int | None
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One start of a job.

    Args:
        number: the number of the attempt, from 1.
        num_nodes: how many launchers it had.
        started: RFC 3339 UTC.
        ended: RFC 3339 UTC; None while the attempt runs.
        outcome: the state of the job after the attempt, and why.
        exit_code: the exit code of the attempt; None while the attempt runs, or if its launchers were killed.
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
        process: its process.
        gpus: the visible devices, as CUDA_VISIBLE_DEVICES names them.
    """

    node: int
    process: ProcessId
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that happened to a job: an action of a person, a supervisor, a rank or a cluster's controller.

    Args:
        time: RFC 3339 UTC.
        name: the action: `submitted`, `suspend_requested`, `started`, …
        actor: the user, the supervisor or another process that did it.
        cause: why, in words.
        detail: further values, by name.
    """

    time: str
    name: str
    actor: str
    cause: str
    detail: dict[str, Any]


def this_user() -> str:
    """The user as an actor of events: `name@host`."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{host_name()}"


def command_line(program: Iterable[str], *, is_module: bool) -> str:
    """Script or module, and arguments, as they follow `python` on a command line."""
    return shlex.join((*(["-m"] if is_module else []), *program))
