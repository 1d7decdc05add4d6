"""What is done with the running step after a stop request, and its report."""

from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.foundation.events.run_events import DeadlineChoice
from safepoint.training.engine.deadline import Deadline
from tests.support.contexts import rank_context


class Rank:
    """A rank somewhere in a step, with a snapshot of the last one or without."""

    def __init__(self, *, available_s: float, step_left_s: float, commit_s: float, can_rescue: bool = True) -> None:
        self.reported: list[DeadlineChoice] = []
        self.rescued: list[int] = []
        self.reasons: list[str] = []
        self.termination: Any = SimpleNamespace(available_s=available_s)
        context: Any = SimpleNamespace(
            termination=self.termination,
            outcome=rank_context().outcome,
            reporter=SimpleNamespace(report_in_time=self.reported.append),
        )
        context.outcome.reached(7)
        self.agreement: Any = SimpleNamespace(step_left_s=lambda: step_left_s, save_s=None)
        self.snapshots: Any = SimpleNamespace(
            can_rescue=lambda step: can_rescue,
            commit_s=lambda: commit_s,
            save_s=None,
            taken_step=6,
            rescue=self._rescue,
        )
        self.deadline = Deadline(context, self.agreement, self.snapshots)

    def _rescue(self, step: int, why: str) -> None:
        self.rescued.append(step)
        self.reasons.append(why)


@pytest.mark.parametrize(
    ("moment", "choice", "rescued"),
    [
        (Rank(available_s=20, step_left_s=5, commit_s=2), "finish_step", []),
        (Rank(available_s=20, step_left_s=60, commit_s=2), "commit_snapshot", [8]),
        (Rank(available_s=2, step_left_s=0, commit_s=2), "commit_snapshot", [8]),
        (Rank(available_s=20, step_left_s=60, commit_s=2, can_rescue=False), "finish_step", []),
    ],
)
def test_the_choice_is_told_with_its_figures(moment: Rank, choice: str, rescued: list[int]) -> None:
    """Once, however often somebody looks at the time."""
    for _ in range(3 if choice == "finish_step" else 1):
        moment.deadline.check()
    assert moment.rescued == rescued
    [reported] = moment.reported
    assert (reported.choice, reported.step, reported.available_s) == (choice, 8, moment.termination.available_s)
    assert choice in {"finish_step", "commit_snapshot"}
    assert reported.line


def test_a_choice_that_changes_is_told_again() -> None:
    """The step was slower than it had seemed."""
    moment = Rank(available_s=20, step_left_s=5, commit_s=2)
    assert moment.deadline.check() == pytest.approx(17.7)
    moment.termination.available_s = 2.1
    assert moment.deadline.check() is None
    assert [event.choice for event in moment.reported] == ["finish_step", "commit_snapshot"]
    moment.deadline.is_last_boundary_reached = True
    assert moment.deadline.check() is None
    assert len(moment.reported) == 2


def test_a_commit_that_may_not_end_in_time_is_reported_as_such() -> None:
    """The running step has ended. The commit needs more time than is left, and is tried."""
    moment = Rank(available_s=1, step_left_s=0, commit_s=3)
    moment.snapshots.save_s = 0.5
    assert moment.deadline.check() is None
    assert moment.rescued == [8]
    said = "the commit of a snapshot and the end of the ranks need about 3.3 s, and 1.0 s are left"
    assert moment.reasons == [said]
