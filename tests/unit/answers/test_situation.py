"""The sentence about a job, and what needs a person's attention."""

from dataclasses import replace
from typing import Any

import pytest

from safepoint.answers.situation import Urgency, attention_of, save_interval_s, sentence_of
from safepoint.foundation import clock
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, SaveStatistics, SpaceRecord, State
from tests.support.dashboards import at
from tests.support.job_values import job_record


def progress(**fields: Any) -> Progress:
    usual: dict[str, Any] = {"time": at(1), "state": State.TRAINING, "step": 1240, "max_steps": 2000, "step_s": 1.0}
    return Progress(**(usual | fields))


@pytest.mark.parametrize(
    ("state", "message", "report", "expected"),
    [
        (JobState.QUEUED, "waits for 2 GPUs; 3rd in queue", None, "Waits: waits for 2 GPUs; 3rd in queue."),
        (JobState.CREATED, "", None, "Is about to start."),
        (JobState.RUNNING, "", None, "Runs; its ranks have not reported progress yet."),
        (
            JobState.RUNNING,
            "",
            progress(resumed_step=1200),
            "Trains: step 1,240 of 2,000, 12 m 40 s left; nothing is saved yet. Resumed from step 1,200.",
        ),
        (
            JobState.RUNNING,
            "",
            progress(state=State.SAVING, step_s=None),
            "Saves: step 1,240 of 2,000; nothing is saved yet.",
        ),
        (JobState.RESUMING, "", progress(resumed_step=1240), "Loads its newest checkpoint (step 1,240)."),
        (JobState.PREEMPTED, "for big", None, "Stopped in favour of another job; it resumes by itself: for big."),
        (JobState.COMPLETE, "", progress(state=State.FINISHED), "Finished at step 1,240."),
        (JobState.FAILED, "the disk is full.", None, "Failed: the disk is full."),
        (JobState.DELETING, "", None, "Is being deleted."),
    ],
)
def test_a_sentence_says_what_happens_and_why(
    state: JobState, message: str, report: Progress | None, expected: str
) -> None:
    """In every state, with and without a report."""
    assert sentence_of(job_record("tiny", state, message=message), report) == expected


def test_the_place_in_the_queue_and_the_time_of_a_verification_are_stated() -> None:
    """If they are known."""
    waiting = job_record("tiny", JobState.QUEUED, message="waits for 2 GPUs")
    assert sentence_of(waiting, None, queue_place=3) == "Waits: waits for 2 GPUs; number 3 in the queue."
    assert sentence_of(job_record("tiny"), None, queue_place=1) == "Waits: number 1 in the queue."
    resumed = progress(resumed_step=1200)
    running = sentence_of(job_record("tiny", JobState.RUNNING), resumed, verified_s=0.3)
    assert running.endswith("Resumed from step 1,200, which was verified in 0.30 s.")
    loading = sentence_of(job_record("tiny", JobState.RESUMING), resumed, verified_s=0.3)
    assert loading == "Loads its newest checkpoint (step 1,200, which was verified in 0.30 s)."


def test_a_suspended_job_says_what_is_saved() -> None:
    """The step, and how to continue."""
    job = job_record("tiny", JobState.SUSPENDED, safe_step=820)
    assert sentence_of(job, None) == "Suspended: step 820 is saved. It continues with “resume”."
    same = replace(job, message="step 820 is saved")
    assert sentence_of(same, None) == sentence_of(job, None)
    assert "nothing is saved" in sentence_of(job_record("tiny", JobState.SUSPENDED), None)
    for step, message, more in ((1240, "step 1240 is saved", ""), (7, "by ada", " By ada.")):  # each fact once
        job = job_record("tiny", JobState.SUSPENDED, safe_step=step, message=message)
        assert sentence_of(job, None) == f"Suspended: step {step:,} is saved. It continues with “resume”.{more}"


def test_every_state_has_a_sentence() -> None:
    """Also one that has not begun."""
    for state in JobState:
        assert sentence_of(job_record("tiny", state), None).endswith(".")


def test_what_needs_attention() -> None:
    """A failure, silence, storage, late saves, a long preemption; and nothing else."""
    running = job_record("tiny", JobState.RUNNING)
    low = SpaceRecord(place="output folder", saves_left=2, is_low=True)
    full = SpaceRecord(place="local folder", saves_left=0, is_low=True)
    late = {
        "started": at(4000),
        "safe_step": 5,
        "safe_time": at(2500),
        "saves": SaveStatistics(count=3),
    }
    cases = [
        (running, progress(), Urgency.NONE, ()),
        (running, progress(time=at(400)), Urgency.PROBLEM, ("no progress for 6 m",)),
        (running, progress(time=at(400), step_s=60.0), Urgency.NONE, ()),
        (running, progress(time=at(400), state=State.EVALUATING), Urgency.NONE, ()),
        (running, progress(space=(low,)), Urgency.WARNING, ("the output folder is nearly full",)),
        (running, progress(space=(full,)), Urgency.PROBLEM, ("the local folder has no room for the next save",)),
        (running, progress(saves=SaveStatistics(unsaved=2)), Urgency.WARNING, ("2 saves did not become durable",)),
        (running, progress(**late), Urgency.WARNING, ("the newest save is 41 m old",)),
        (job_record("tiny", JobState.FAILED, message="why"), None, Urgency.PROBLEM, ("why",)),
        (job_record("tiny", JobState.FAILED), None, Urgency.PROBLEM, ("it has failed",)),
        (job_record("tiny", JobState.SUSPENDED), progress(time=at(9999)), Urgency.NONE, ()),
    ]
    for job, report, urgency, reasons in cases:
        found = attention_of(job, report)
        assert (found.urgency, found.reasons) == (urgency, reasons)
    preempted = job_record("tiny", JobState.PREEMPTED)
    assert attention_of(preempted, None, changed=at(7300)).reasons == ("preempted for 2 h",)
    assert attention_of(preempted, None, changed=at(60)).urgency is Urgency.NONE


def test_the_interval_of_saves_is_measured() -> None:
    """From the second save on, and only with times that are valid."""
    assert save_interval_s(progress(started=at(100), safe_time=at(40), saves=SaveStatistics(count=1))) is None
    found = save_interval_s(progress(started=at(100), safe_time=at(40), saves=SaveStatistics(count=3)))
    assert found == pytest.approx(20, abs=0.1)
    assert save_interval_s(progress(started="then", safe_time=clock.utc_now(), saves=SaveStatistics(count=3))) is None
