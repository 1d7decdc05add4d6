"""Events about a start of the ranks: the checkpoint that it resumes from, and how long its phases took.

The events are typed records (docs/progress.md).
"""

import enum
from dataclasses import dataclass

from safepoint.foundation.events.stream import Event
from safepoint.foundation.units import plural


class ResumedFromOtherRun(Event, is_warning=True):
    """The training resumes from a checkpoint of run `run_id`, but run `last_run_id` used the output location last."""

    step: int
    path: str
    run_id: str
    last_run_id: str

    def _sentence(self) -> str:
        return (
            f"{self.path} belongs to run {self.run_id[:8]}, but run {self.last_run_id[:8]} used this location last. "
            f"The training continues run {self.run_id[:8]}, whose checkpoint is the newest valid one. If that is "
            "not intended, stop the run, move this checkpoint away, and find out who has put it there"
        )


class Phase(enum.StrEnum):
    """The phases of a start of the ranks, in the order in which they usually end.

    The launcher passes the first four, and each rank the others. Only the Trainer of Transformers has `IMPORTS_DONE`.
    """

    NOTICED = "noticed"
    """The launcher has noticed that a rank has ended; the first start has no such phase."""
    SURVIVORS_ENDED = "survivors ended"
    """The other ranks have ended; the first start has no such phase."""
    STORE_READY = "store ready"
    """The launcher is connected to the store where the ranks find each other."""
    RANKS_BORN = "ranks born"
    """The processes of the ranks exist."""
    SCRIPT_BEGUN = "script begun"
    """The rank executes the first line of the user's script."""
    IMPORTS_DONE = "imports done"
    """The module of the Trainer is imported."""
    TRAINER_REACHED = "trainer reached"
    """The script has called the training loop."""
    GROUP_FORMED = "group formed"
    """The ranks are connected to each other."""
    STATE_LOADED = "state loaded"
    """Model and optimizer are loaded, and the loop begins."""
    FIRST_STEP_DONE = "first step done"
    """The optimizer has stepped for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a process has passed a phase of a start.

    Args:
        phase: the phase that has ended.
        at_s: seconds on the machine's monotonic clock, which all processes of the machine share.
    """

    phase: Phase
    at_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", Phase(self.phase))  # raises ValueError if the text is not a phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnd:
    """When a phase of a start was over on a node; part of `StartTimed`.

    Args:
        phase: the name of the phase.
        at_s: seconds since the start began.
        rank: the last rank that finished the phase; None for a phase of the launcher.
    """

    phase: str
    at_s: float
    rank: int | None


class StartTimed(Event, is_quiet=True):
    """How long each phase of a start of the ranks took on a node.

    A first start begins when `safepoint run` starts the launcher, and a restart when the launcher notices that a rank
    has ended. If the ranks ended before their first step, the later phases are missing.
    """

    restart: int
    node: int
    num_ranks: int
    phases: tuple[PhaseEnd, ...]

    def _sentence(self) -> str:
        what = f"restart {self.restart}" if self.restart else "first start"
        ends = ", ".join(f"{one.phase} {one.at_s:.2f} s" for one in self.phases)
        return f"{what} of {plural(self.num_ranks, 'rank')} on node {self.node}: {ends}"
