"""After a stop request: decides whether the running step can be finished before the platform kills the job."""

from safepoint.foundation.events.run_events import DeadlineChoice
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.snapshots import Snapshots

_LEAVING_S = 0.3
"""The assumed time, in seconds, that the ranks need to end after the commit of a snapshot."""


class Deadline:
    """Checks how much time is left for the running step. The thread that watches signals calls `check`.

    Args:
        context: has the time that is left, and the number of the last finished step.
        agreement: has measured how long steps take.
        snapshots: has the newest snapshot, and estimates how long it takes to make this snapshot durable.
    """

    def __init__(self, context: RankContext, agreement: Agreement, snapshots: Snapshots) -> None:
        self._context = context
        self._agreement = agreement
        self._snapshots = snapshots
        self.is_last_boundary_reached = False
        """Whether the loop has reached its last boundary: its last step has ended. After that, there is no running
        step to give up."""
        self._reported = ""

    def check(self) -> float | None:
        """Request a commit of the newest snapshot if the running step cannot be finished in time.

        The keeper (the process that writes snapshots to disk) then commits the snapshot and ends the ranks.

        Returns:
            Seconds until the next check; None for no further check.
        """
        snapshots, step = self._snapshots, self._context.outcome.step
        if self.is_last_boundary_reached:
            return None
        available_s = self._context.termination.available_s
        step_left_s = self._agreement.step_left_s()
        if not snapshots.can_rescue(step):
            self._report("finish_step", step_left_s + (self._agreement.save_s or 0.0), available_s, None)
            return None
        commit_s = snapshots.commit_s()
        needed_s = step_left_s + (snapshots.save_s or commit_s)
        patience_s = available_s - commit_s - _LEAVING_S
        if needed_s <= available_s and patience_s > 0:
            self._report("finish_step", needed_s, available_s, commit_s)
            return patience_s
        why = (
            f"the step and its save need about {needed_s:.1f} s, and {max(0.0, available_s):.1f} s are left"
            if needed_s > available_s
            else f"the commit of a snapshot and the end of the ranks need about {commit_s + _LEAVING_S:.1f} s, and "
            f"{max(0.0, available_s):.1f} s are left"
        )
        snapshots.rescue(step + 1, why)
        self._report("commit_snapshot", needed_s, available_s, commit_s)
        return None

    def _report(self, choice: str, needed_s: float, available_s: float, commit_s: float | None) -> None:
        if self._reported == choice:
            return
        self._reported = choice
        self._context.reporter.report_in_time(
            DeadlineChoice(
                choice=choice,
                step=self._context.outcome.step + 1,
                needed_s=round(needed_s, 3),
                available_s=round(max(0.0, available_s), 3),
                snapshot_step=self._snapshots.taken_step,
                commit_s=None if commit_s is None else round(commit_s, 3),
            )
        )
