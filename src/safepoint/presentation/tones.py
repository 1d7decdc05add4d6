"""The colour of each state of a job, and the word that OpenShift AI uses for the state."""

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

OTHER_WORDS: Mapping[JobState, str] = {
    JobState.STARTING: "Pending",
    JobState.RESUMING: "Running",
    JobState.SUSPENDED: "Paused",
    JobState.PREEMPTED: "Preempted or Suspended",
}
"""The word for a state on OpenShift AI's page of training jobs, if this word differs from Safepoint's."""
