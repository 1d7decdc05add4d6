"""What an action would mean for a job, before it is done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safepoint.answers import consequence
from safepoint.answers.consequence import Action, actions_of, consequence_of
from safepoint.answers.freezing import FreezePlan
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, SaveStatistics, State
from tests.support.dashboards import at
from tests.support.job_values import job_record
from tests.unit.jobs.cluster.test_state import condition, of, trainjob

RUNNING = job_record("tiny", JobState.RUNNING, safe_step=30)


def training(**fields: Any) -> Progress:
    usual: dict[str, Any] = {
        "time": at(1),
        "state": State.TRAINING,
        "step": 40,
        "step_s": 2.0,
        "safe_step": 30,
        "safe_time": at(20),
        "saves": SaveStatistics(expected_s=3.0),
    }
    return Progress(**(usual | fields))


def test_a_save_that_fits_loses_nothing() -> None:
    """The time of a save is that of a step and of the save itself."""
    found = consequence_of(Action.SUSPEND, RUNNING, training())
    assert (found.is_possible, found.fits, found.safe_step, found.save_needed_s) == (True, True, 30, 5.0)
    assert found.safe_age_s == pytest.approx(20, abs=1)
    assert found.sentences[0].startswith("The last safe point is step 30, 2")
    assert "it fits, and no step is lost" in found.sentences[1]


def test_a_save_that_does_not_fit_loses_the_steps_since_the_last_one() -> None:
    """Ten steps of two seconds; and nothing is claimed if the pace is not known."""
    slow = SaveStatistics(expected_s=48.0)
    found = consequence_of(Action.SUSPEND, RUNNING, training(saves=slow))
    assert (found.fits, found.lost_s) == (False, 20.0)
    assert "it may not fit, and 20 s of work would be lost" in found.sentences[1]
    unknown = consequence_of(Action.SUSPEND, RUNNING, training(saves=slow, step_s=None))
    assert (unknown.lost_s, "would be lost" in unknown.sentences[1]) == (None, False)


def test_a_save_that_does_not_fit_leaves_choices() -> None:
    """To wait for the next save, if its time is known and not past; on a cluster, the save can come first."""
    slow = SaveStatistics(expected_s=48.0, count=3)
    waits = "If you wait, less is lost: the next save is due in about"
    report = training(saves=slow, started=at(320))  # three saves in 300 s, the last one 20 s ago
    assert any(one.startswith(f"{waits} 1 m 2") for one in consequence_of(Action.SUSPEND, RUNNING, report).sentences)
    late = training(saves=slow, started=at(320), safe_time=at(200))
    for other in (late, training(saves=slow), training(started=at(320))):
        assert not any(waits in one for one in consequence_of(Action.SUSPEND, RUNNING, other).sentences)
    on_cluster = of(trainjob())
    assert on_cluster.state.holds_slots
    first = "the job is saved before it is stopped"
    for action, is_first in ((Action.SUSPEND, True), (Action.SCALE, True), (Action.DELETE, False)):
        assert any(first in one for one in consequence_of(action, on_cluster, report).sentences) == is_first
    assert not any(first in one for one in consequence_of(Action.SUSPEND, RUNNING, report).sentences)


def test_an_unknown_duration_is_stated() -> None:
    """Before the first save, and without a size."""
    found = consequence_of(Action.SUSPEND, RUNNING, training(saves=SaveStatistics(), safe_step=None, safe_time=None))
    assert (found.fits, found.save_needed_s) == (None, None)
    assert found.sentences[0] == "Nothing is saved yet."
    assert "not known yet" in found.sentences[1]


def test_without_a_training_nothing_has_to_be_saved() -> None:
    """A job that waits, or whose ranks have ended."""
    for job, report in ((job_record("tiny"), None), (RUNNING, training(state=State.FINISHED))):
        found = consequence_of(Action.DELETE, job, report, "/out")
        assert found.sentences[0] == "No training runs now, so there is nothing to save."
        assert "Its checkpoints in /out stay" in found.sentences[-1]


def test_each_state_accepts_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the commands accept; a refusal says why."""
    monkeypatch.setattr(consequence, "is_promising", lambda: False)
    expected = {
        JobState.RUNNING: [Action.SUSPEND, Action.SCALE, Action.DELETE],
        JobState.SUSPENDED: [Action.RESUME, Action.SCALE, Action.DELETE],
        JobState.FAILED: [Action.RESUME, Action.SCALE, Action.DELETE],
        JobState.COMPLETE: [Action.DELETE],
        JobState.DELETING: [],
    }
    for state, actions in expected.items():
        job = job_record("tiny", state)
        assert actions_of(job) == actions
        for action in set(Action) - set(actions):
            found = consequence_of(action, job, None)
            assert (found.is_possible, len(found.sentences)) == (False, 1)


def test_a_freeze_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the image is, its size at most, and what is in it; or why this machine cannot freeze the job."""
    plan = FreezePlan(folder=Path("/state/images"), num_processes=3, memory_bytes=2 * 10**9, free_bytes=10**9)
    found = consequence_of(Action.FREEZE, RUNNING, training(), freeze=plan)
    assert (found.is_possible, found.fits, found.safe_step) == (True, None, 30)
    text = " ".join(found.sentences)
    assert "All 3 processes of the job stop at the same moment" in text
    assert "are written to a process image in /state/images, and end" in text
    assert "at most 2.0 GB, and 1.0 GB are free there: it may not fit. If it does not, the processes run on." in text
    assert "it uses the newest checkpoint: step 30, 2" in text
    assert "with all passwords in it" in text
    assert "may not fit" not in " ".join(
        consequence_of(Action.FREEZE, RUNNING, None, freeze=replace(plan, free_bytes=None)).sentences
    )
    obstacle = FreezePlan(folder=Path("/x"), obstacle="This machine cannot freeze the job: CRIU is not installed.")
    for given in (None, obstacle):
        assert not consequence_of(Action.FREEZE, RUNNING, training(), freeze=given).is_possible
    assert not consequence_of(Action.FREEZE, of(trainjob()), None, freeze=plan).is_possible
    monkeypatch.setattr(consequence, "is_promising", lambda: True)
    assert actions_of(RUNNING) == [Action.SUSPEND, Action.SCALE, Action.FREEZE, Action.DELETE]
    assert Action.FREEZE not in actions_of(job_record("tiny", JobState.SUSPENDED))


def test_a_job_that_cannot_go_on_says_what_to_do() -> None:
    """On a cluster, a failed job is submitted again, and a job that Safepoint did not submit has a fixed size."""
    failed = of(condition(trainjob(), "Failed"))
    assert actions_of(failed) == [Action.DELETE]
    assert consequence_of(Action.RESUME, failed, None).sentences == (
        "The job is Failed; it has to be submitted again.",
    )
    assert "submit it again" in consequence_of(Action.SCALE, failed, None).sentences[0]
    other = trainjob()
    other["metadata"]["annotations"] = None
    assert "did not submit" in consequence_of(Action.SCALE, of(other), None).sentences[0]


def test_a_document_has_plain_values() -> None:
    """Names and numbers that JSON can hold."""
    document = consequence_of(Action.RESUME, job_record("tiny", JobState.SUSPENDED, safe_step=7), None).to_document()
    assert document["action"] == "resume"
    assert document["sentences"] == [
        "The job continues from its newest checkpoint, step 7, as soon as there is room for it.",
        "The checkpoint is verified first. If it is damaged, the newest valid checkpoint is used.",
    ]


def test_a_resume_of_a_job_without_a_known_checkpoint() -> None:
    """It names none: there may be none, or the place does not know it."""
    found = consequence_of(Action.RESUME, job_record("tiny", JobState.FAILED), None)
    assert found.is_possible
    assert found.sentences[0] == "No checkpoint of the job is known. The job starts as soon as there is room for it."


def test_a_job_goes_on_from_its_image() -> None:
    """The reason is that of the resume itself."""
    job = job_record("tiny", JobState.SUSPENDED, safe_step=7)
    found = consequence_of(Action.RESUME, job, None, begins="from images/image-1, 3 s old; there is no checkpoint")
    assert found.sentences[0] == "The job continues from images/image-1, 3 s old; there is no checkpoint."
