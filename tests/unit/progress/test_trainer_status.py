"""A run's progress as Kubeflow's controllers have it."""

import json
from dataclasses import replace

import pytest

from safepoint.progress.record import OUTPUT_FOLDER, Progress, SpaceRecord, State
from safepoint.progress.trainer_status import TrainerStatus
from tests.unit.progress.test_record import FULL, TIME

# The types that the controller's own record has; a wrong one makes it unreadable as a whole.
TYPES = {
    "progressPercentage": int,
    "estimatedRemainingSeconds": int,
    "currentStep": int,
    "totalSteps": int,
    "currentEpoch": float,
    "totalEpochs": int,
    "trainMetrics": dict,
    "evalMetrics": dict,
    "lastUpdatedTime": str,
}


def record(progress: Progress, *, has_ended: bool = False) -> dict[str, object]:
    return json.loads(TrainerStatus.of(progress, has_ended=has_ended).to_bytes())


def test_the_shape_of_openshift_ai() -> None:
    """Every field under its name and with its type; only numbers among the metrics."""
    status = record(replace(FULL, num_epochs=2.5))
    assert {name: type(value) for name, value in status.items()} == TYPES
    assert status == {
        "progressPercentage": 24,
        "estimatedRemainingSeconds": 285,
        "currentStep": 120,
        "totalSteps": 500,
        "currentEpoch": 1.25,
        "totalEpochs": 3,
        "trainMetrics": {"loss": 0.5, "grad_norm": 1.5, "throughput_samples_sec": 128.0},
        "evalMetrics": {"eval_loss": 0.75},
        "lastUpdatedTime": TIME,
    }


def test_an_image_instead_of_a_checkpoint() -> None:
    """Only the step of the newest checkpoint is saved: the message must not name a later one."""
    status = TrainerStatus.of(FULL, has_ended=False)
    message = json.loads(status.to_termination_message(image={"name": "image-1"}))
    assert FULL.safe_step != FULL.step
    assert (message["currentStep"], message["processImage"]) == (FULL.safe_step, {"name": "image-1"})
    message = json.loads(replace(status, safe_step=None).to_termination_message(image={"name": "image-1"}))
    assert message["currentStep"] is None


def test_what_nobody_knows_is_null() -> None:
    """And not 0, which would be an answer."""
    status = record(Progress(time=TIME, state=State.TRAINING, step=3))
    unknown = ("progressPercentage", "estimatedRemainingSeconds", "totalSteps", "totalEpochs")
    assert [status[name] for name in unknown] == [None] * 4


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("state", State)
def test_100_percent_and_no_time_left_only_when_the_job_has_ended_well(state: State, has_ended: bool) -> None:
    """Behind the last step there may still be a program to end; by 0 seconds the controller knows a complete job."""
    status = record(replace(FULL, state=state, step=500), has_ended=has_ended)
    is_done = has_ended and state is State.FINISHED
    assert status["progressPercentage"] == (100 if is_done else 99)
    assert (status["estimatedRemainingSeconds"] == 0) == is_done


def test_a_job_that_stopped_early() -> None:
    """Its percentage stays, no time is left, and the termination message says why."""
    status = TrainerStatus.of(replace(FULL, state=State.FINISHED), has_ended=True)
    message = json.loads(status.to_termination_message())
    assert (message["progressPercentage"], message["estimatedRemainingSeconds"]) == (24, 0)
    assert message.pop("message") == "training stopped early, at step 120 of 500"
    assert message == json.loads(status.to_bytes())
    whole = TrainerStatus.of(replace(FULL, state=State.FINISHED, step=500), has_ended=True)
    assert "message" not in json.loads(whole.to_termination_message())


def test_a_failed_job_has_no_time_left_to_tell() -> None:
    """It does not go on."""
    assert record(replace(FULL, state=State.FAILED), has_ended=True)["estimatedRemainingSeconds"] is None


def test_a_termination_message_is_short_enough() -> None:
    """With very many metrics, without them: what is cut off cannot be read."""
    many = {f"rewards/function_{number}/mean": 1.0 for number in range(200)}
    status = TrainerStatus.of(replace(FULL, train_metrics=many), has_ended=True)
    message = status.to_termination_message()
    assert len(message) < 4096
    assert json.loads(message)["currentStep"] == 120
    short = TrainerStatus.of(FULL, has_ended=True)
    assert short.to_termination_message() == short.to_bytes()


def test_the_body_of_a_status_update() -> None:
    """KEP-2779: whole numbers, metrics as texts, no more than the controller takes, nothing that is unknown."""
    status = TrainerStatus.of(FULL, has_ended=False)
    body = json.loads(status.to_request())["trainerStatus"]
    metrics = {metric["name"]: metric["value"] for metric in body.pop("metrics")}
    assert body == {"progressPercentage": 24, "estimatedRemainingSeconds": 285, "lastUpdatedTime": TIME}
    assert metrics["currentStep"] == "120"
    assert metrics["loss"] == "0.5"
    assert metrics["eval_loss"] == "0.75"
    assert (metrics["spaceSavesLeft"], metrics["spaceSeconds"]) == ("0", "60.0")
    assert (metrics["outputFreeBytes"], metrics["outputSizeBytes"]) == (str(10**10), str(10**11))
    output = SpaceRecord(place=OUTPUT_FOLDER, free_bytes=25, size_bytes=100, remaining_s=90.0)
    space = json.loads(TrainerStatus.of(replace(FULL, space=(output,)), has_ended=False).to_request())
    posted = {metric["name"]: metric["value"] for metric in space["trainerStatus"]["metrics"]}
    names = ("outputFreeBytes", "outputSizeBytes", "outputSeconds", "spaceSeconds")
    assert [posted.get(name) for name in names] == ["25", "100", "90.0", None]
    again = TrainerStatus.of(replace(FULL, repeated_steps=7), has_ended=False).to_request()
    assert {"name": "repeatedSteps", "value": "7"} in json.loads(again)["trainerStatus"]["metrics"]
    many = replace(FULL, train_metrics={f"m{number}": 1.0 for number in range(400)})
    assert len(json.loads(TrainerStatus.of(many, has_ended=False).to_request())["trainerStatus"]["metrics"]) == 256
    unknown = TrainerStatus.of(Progress(time=TIME, state=State.TRAINING, step=3), has_ended=False)
    assert set(json.loads(unknown.to_request())["trainerStatus"]) == {"metrics", "lastUpdatedTime"}
