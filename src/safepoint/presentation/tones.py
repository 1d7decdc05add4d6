"""The colour of each state of a job."""

from collections.abc import Mapping

from safepoint.jobs.model.states import JobState

TONES: Mapping[JobState, str] = {
    JobState.RUNNING: "good",
    JobState.COMPLETE: "done",
    JobState.FAILED: "bad",
    JobState.INADMISSIBLE: "bad",
    JobState.SUSPENDED: "still",
    JobState.PREEMPTED: "wait",
    JobState.QUEUED: "wait",
    JobState.CREATED: "wait",
    JobState.STARTING: "busy",
    JobState.RESUMING: "busy",
    JobState.SUSPENDING: "busy",
    JobState.RESTARTING: "busy",
    JobState.DELETING: "busy",
}
"""The colour of each state, by its name in the style sheet."""
