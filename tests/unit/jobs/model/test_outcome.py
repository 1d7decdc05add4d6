"""What the end of an attempt means, over all exit codes and wishes."""

import pytest

from safepoint.errors import ExitCode
from safepoint.jobs.model.outcome import MAX_SETBACKS, Outcome, conclude
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState

COMPLETE, FAILED, SUSPENDED = JobState.COMPLETE, JobState.FAILED, JobState.SUSPENDED
PREEMPTED, RESTARTING = JobState.PREEMPTED, JobState.RESTARTING


def end(*codes: int | None, wanted: RequestedAction = RequestedAction.RUN, **values: object) -> Outcome:
    values = {"safe_step": None, "has_progressed": False, "setbacks": 0} | values
    return conclude(codes, wanted, **values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wanted", list(RequestedAction))
def test_all_zero_is_complete_whatever_was_wanted(wanted: RequestedAction) -> None:
    """A job that ended before it heard of a request has ended."""
    assert end(0, 0, wanted=wanted) == Outcome(state=COMPLETE, exit_code=0, message="")


# Exit code of a single launcher → state where it was to run, to be suspended, to be preempted.
TABLE = [
    (0, COMPLETE, COMPLETE, COMPLETE),
    (1, FAILED, FAILED, FAILED),
    (2, FAILED, FAILED, FAILED),
    (3, FAILED, FAILED, FAILED),
    (11, FAILED, FAILED, FAILED),
    (12, FAILED, FAILED, FAILED),
    (13, FAILED, SUSPENDED, PREEMPTED),
    (14, FAILED, FAILED, FAILED),
    (16, FAILED, FAILED, FAILED),
    (75, RESTARTING, SUSPENDED, PREEMPTED),
    (130, RESTARTING, SUSPENDED, PREEMPTED),
    (137, FAILED, FAILED, FAILED),
    (143, RESTARTING, SUSPENDED, PREEMPTED),
    (None, RESTARTING, SUSPENDED, PREEMPTED),
]


@pytest.mark.parametrize(("code", "run", "suspend", "preempt"), TABLE)
def test_one_launcher(code: int | None, run: JobState, suspend: JobState, preempt: JobState) -> None:
    """The state, and that the exit code is passed on."""
    assert end(code).state is run
    for wanted, state in (
        (RequestedAction.SUSPEND, suspend),
        (RequestedAction.DELETE, suspend),
        (RequestedAction.PREEMPT, preempt),
    ):
        outcome = end(code, wanted=wanted)
        assert outcome.state is state
        if code is not None:
            assert outcome.exit_code == code
    assert end(code).exit_code == code


def test_the_table_knows_every_exit_code_of_ours() -> None:
    """A new one has to be thought of."""
    ours = {int(code) for code in ExitCode} - {ExitCode.NOT_FOUND, ExitCode.TIMED_OUT}  # of commands, not of runs
    assert ours <= {code for code, *_ in TABLE if code is not None}


@pytest.mark.parametrize("codes", [(75, 143), (143, 75)])
def test_one_node_that_saved_speaks_for_all(codes: tuple[int, int]) -> None:
    """Checkpoints are whole or absent: a 75 means that all of it is there."""
    outcome = end(*codes, wanted=RequestedAction.SUSPEND, safe_step=7)
    assert (outcome.state, outcome.exit_code, outcome.message) == (SUSPENDED, 75, "step 7 is saved")


def test_a_stop_without_a_save_says_so() -> None:
    """And which step is safe all the same."""
    outcome = end(143, wanted=RequestedAction.SUSPEND, safe_step=40)
    assert outcome.message == "it was stopped without a save; step 40 is saved"
    assert "nothing is saved" in end(143, wanted=RequestedAction.SUSPEND).message


def test_a_save_of_unknown_step_is_not_called_nothing() -> None:
    """The ranks may have reported nothing, and their exit code says that they have saved."""
    assert end(75, wanted=RequestedAction.SUSPEND).message == "its state is saved"


def test_a_checkpoint_that_is_not_in_the_store_is_safe_here_only() -> None:
    """A person who cleans this machine must know."""
    outcome = end(75, wanted=RequestedAction.SUSPEND, safe_step=7, missing_in="s3://bucket/run")
    assert outcome.message.startswith(
        "step 7 is saved on this machine only; when the job resumes, this step is uploaded to s3://bucket/run"
    )
    failed = end(13, wanted=RequestedAction.SUSPEND, safe_step=7, missing_in="s3://bucket/run")
    assert failed.message.count("s3://bucket/run") == 1
    assert "upload to the object store" not in failed.message


def test_an_upload_that_did_not_finish_suspends_all_the_same() -> None:
    """13 after a request: what is safe is safe here; the next start takes it there."""
    outcome = end(13, wanted=RequestedAction.SUSPEND, safe_step=5)
    assert outcome.state is SUSPENDED
    assert outcome.exit_code == 13
    assert "the upload to the object store is not complete" in outcome.message


@pytest.mark.parametrize("codes", [(75, 13), (13, 75)])
def test_a_node_that_saved_beside_one_that_did_not_finish_its_upload(codes: tuple[int, int]) -> None:
    """A 75 means that the whole checkpoint is there. The exit code and the message both state that."""
    outcome = end(*codes, wanted=RequestedAction.SUSPEND, safe_step=5)
    assert (outcome.state, outcome.exit_code) == (SUSPENDED, 75)
    assert outcome.message == "step 5 is saved; the upload to the object store is not complete"
    assert end(*codes).exit_code == 13


def test_a_program_that_fails_while_it_is_stopped_has_failed() -> None:
    """Whatever was wanted: it would fail again."""
    assert end(75, 3, wanted=RequestedAction.SUSPEND).state is FAILED


def test_a_failure_says_what_it_means_and_where_to_look() -> None:
    """For ours with a word, for the program's own with the number."""
    assert end(14).message == "exit code 14: all its checkpoints are damaged; see its logs"
    assert end(3).message == "exit code 3; see its logs"


def test_the_programs_own_exit_code_counts_more_than_its_consequences() -> None:
    """Ranks that lost a peer say 1; the node where it happened says why."""
    assert end(1, 3).exit_code == 3
    assert end(3, 1).exit_code == 3
    assert end(1, 1).exit_code == 1


@pytest.mark.parametrize("codes", [(None, 1), (1, None), (None, 75), (None, None), (0, None)])
def test_launchers_that_were_killed_are_started_again_with_the_others(codes: tuple[int | None, ...]) -> None:
    """What the others say is the consequence: their ranks lost their peers."""
    outcome = end(*codes)
    assert outcome.state is RESTARTING
    assert "was killed" in outcome.message


def test_an_own_code_beside_a_killed_launcher_is_a_failure() -> None:
    """A program's 3 is no consequence of anything: the others were killed because they did not leave after it."""
    assert end(3, None).state is FAILED
    assert end(3, None).exit_code == 3


def test_setbacks_are_counted_and_come_to_an_end() -> None:
    """One more each time, without progress; then it has failed, and says how often."""
    setbacks = 0
    for number in range(MAX_SETBACKS):
        outcome = end(75, setbacks=setbacks)
        assert outcome.state is RESTARTING
        assert outcome.setbacks == number + 1
        setbacks = outcome.setbacks
    outcome = end(75, setbacks=setbacks, safe_step=3)
    assert outcome.state is FAILED
    assert outcome.exit_code == 75
    assert f"{MAX_SETBACKS + 1} times without progress" in outcome.message
    assert "step 3 is saved" in outcome.message


def test_progress_forgives_all_setbacks() -> None:
    """One that was killed a hundred times and went on each time goes on."""
    outcome = end(None, setbacks=MAX_SETBACKS, has_progressed=True, safe_step=9)
    assert outcome.state is RESTARTING
    assert outcome.setbacks == 1


@pytest.mark.parametrize("wanted", [RequestedAction.SUSPEND, RequestedAction.PREEMPT])
def test_what_was_asked_for_is_no_setback(wanted: RequestedAction) -> None:
    """A job may be preempted as often as anybody likes."""
    assert end(75, wanted=wanted, setbacks=MAX_SETBACKS).setbacks == 0


def test_a_frozen_job_is_suspended_and_names_its_image() -> None:
    """Its launchers were killed. If they saved instead, because they ran on, the checkpoint counts."""
    frozen = end(None, None, wanted=RequestedAction.FREEZE, safe_step=3, image="/images/image-1")
    assert (frozen.state, frozen.message) == (SUSPENDED, "its process image is /images/image-1; step 3 is saved")
    saved = end(75, 75, wanted=RequestedAction.FREEZE, safe_step=4, image="/images/image-1")
    assert (saved.state, saved.message) == (SUSPENDED, "step 4 is saved")
    assert end(None, safe_step=3, image="/images/image-1").state is RESTARTING


def test_why_safepoint_has_killed_the_launchers() -> None:
    outcome = end(None, safe_step=3, cause="made no progress")
    assert (outcome.state, outcome.message) == (RESTARTING, "it made no progress; step 3 is saved")
