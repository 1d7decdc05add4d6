"""Whether the running step can still be ended before the platform kills, once somebody has asked to stop."""

from safepoint.foundation.events.run_events import DeadlineChoice
from safepoint.training.context.outcome import Outcome
from safepoint.training.context.reporter import Reporter
from safepoint.training.context.termination import Termination
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.snapshots import Snapshots

_LEAVING_S = 0.3
"""What leaving takes, once a snapshot is committed."""


class Deadline:
    """Looks at the time beside the loop, on the thread that watches signals.

    Args:
        termination: how much time is left.
        outcome: which step is running.
        reporter: reports the choice.
        agreement: how long steps take.
        snapshots: what there is in memory, and how long it takes to make it durable.
    """

    def __init__(
        self,
        termination: Termination,
        outcome: Outcome,
        reporter: Reporter,
        agreement: Agreement,
        snapshots: Snapshots,
    ) -> None:
        self._termination = termination
        self._outcome = outcome
        self._reporter = reporter
        self._agreement = agreement
        self._snapshots = snapshots
        self.is_met = False
        """Whether the loop has come to its last boundary: nothing needs to be given up any more."""
        self._told = ""

    def look(self) -> float | None:
        """Give the running step up when it cannot be ended in time.

        Returns:
            Seconds after which to look again; None for never.
        """
        snapshots, step = self._snapshots, self._outcome.step
        if self.is_met:
            return None
        available_s = self._termination.available_s
        step_left_s = self._agreement.step_left_s()
        if not snapshots.can_rescue(step):
            self._tell("finish_step", step_left_s + (self._agreement.save_s or 0.0), available_s, None)
            return None
        commit_s = snapshots.commit_s()
        needed_s = step_left_s + (snapshots.save_s or commit_s)
        patience_s = available_s - commit_s - _LEAVING_S
        if needed_s <= available_s and patience_s > 0:
            self._tell("finish_step", needed_s, available_s, commit_s)
            return patience_s
        why = (
            f"it needs about {needed_s:.1f} s more with its save, and {max(0.0, available_s):.1f} s are left"
            if needed_s > available_s
            else f"{max(0.0, available_s):.1f} s are left, just enough to commit a snapshot"
        )
        snapshots.rescue(step + 1, why)
        self._tell("commit_snapshot", needed_s, available_s, commit_s)
        return None

    def _tell(self, choice: str, needed_s: float, available_s: float, commit_s: float | None) -> None:
        if self._told == choice:
            return
        self._told = choice
        self._reporter.report_in_time(
            DeadlineChoice(
                choice=choice,
                step=self._outcome.step + 1,
                needed_s=round(needed_s, 3),
                available_s=round(max(0.0, available_s), 3),
                snapshot_step=self._snapshots.taken_step,
                commit_s=None if commit_s is None else round(commit_s, 3),
            )
        )
