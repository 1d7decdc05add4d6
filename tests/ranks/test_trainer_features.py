"""Features of the Trainer in scripts: each run is interrupted, resumed, and compared with an uninterrupted one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.equality import assert_same_run
from tests.support.hub import FakeHub, fake_hub
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(900)]

TWO = ("--nproc-per-node", "2")
_EVALUATED = ("--eval-strategy", "steps", "--eval-steps", "4", "--save-strategy", "steps", "--save-steps", "4")


def _settings(**values: object) -> tuple[str, str]:
    return "--settings", json.dumps(values)


def _start(output: Path, program: list[str], *options: str, **env: str) -> Job:
    """Start two ranks, or one if the program is compiled, which takes minutes once for all runs of a test."""
    if "torch_compile" in "".join(program):
        return safepoint(
            output, *options, program=program, TORCHINDUCTOR_CACHE_DIR=str(output.parent / "code"), **env
        )
    return safepoint(output, *TWO, *options, program=program, **env)


def _finish(output: Path, *arguments: str, **env: str) -> Job:
    job = _start(output, tiny(output, *arguments), **env)
    with no_orphans(job):
        assert job.wait(400) == 0, job.text
    return job


def _interrupt(output: Path, mark: str, *arguments: str, **env: str) -> Job:
    """Send SIGTERM to the last rank when it has reached `mark` in this attempt."""
    attempts = len(read_events(output, "attempt_started"))
    for path in output.glob("marks-*"):
        path.unlink()
    job = _start(output, tiny(output, *arguments, "--step-ms", "50"), **env)
    with no_orphans(job):
        job.wait_for_event("attempt_started", count=attempts + 1)
        pids = job.rank_pids()
        job.wait_for_mark(mark, rank=len(pids) - 1)
        os.kill(pids[-1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    return job


FEATURES = {
    # Early stopping ends it at step 16: the best is that of step 4, and no later one is better by enough.
    "bf16, gradient checkpointing, early stopping, the best model, files of the script's own": (
        *(
            "--epochs",
            "8",
            "--grad-accum",
            "1",
            "--best",
            "--patience",
            "3",
            "--keep-more",
            "--add-file",
            *_EVALUATED,
        ),
        *_settings(bf16=True, gradient_checkpointing=True),
    ),
    # Its learning rate follows the evaluations: each evaluation and each log line has to come exactly once.
    "reduce_lr_on_plateau": (
        *("--epochs", "2", "--grad-accum", "1", "--samples", "32", "--logging-steps", "2", "--best", *_EVALUATED),
        *_settings(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "mode": "max"}),
    ),
    "torch.compile": ("--epochs", "1", "--grad-accum", "1", "--samples", "32", *_settings(torch_compile=True)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_survives_an_interruption(feature: str, tmp_path: Path) -> None:
    """Weights, optimizer and log equal the reference; every checkpoint has the script's files."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    _finish(reference, *FEATURES[feature])
    _interrupt(output, "train 6", *FEATURES[feature])
    step = committed_steps(output)[-1]
    _finish(output, *FEATURES[feature])
    assert read_events(output, "resumed")[0]["step"] == step
    assert read_events(output, "finished")[0]["step"] == 16
    assert_same_run(output, reference)
    if "--keep-more" in FEATURES[feature]:
        assert (output / "newest-step.txt").read_text() == "16"
    for checkpoint in list_checkpoints(output):
        verdict = verify(checkpoint)
        assert verdict.is_valid, verdict.faults
        if "--keep-more" in FEATURES[feature]:
            assert verdict.manifest is not None
            names = {entry.path for entry in verdict.manifest.files}
            assert {"kept.json", "kept.pt", "notes-0.txt", "notes-1.txt"} <= names
            assert json.loads((checkpoint / "kept.json").read_text())["step"] == verdict.manifest.step


def test_several_trainers_in_one_script(tmp_path: Path) -> None:
    """Interrupted in the first, at its end and in the second; each resumes where it stopped."""
    arguments = ("--trainers", "2", "--epochs", "1", "--grad-accum", "1")
    reference, output = tmp_path / "reference", tmp_path / "run"
    second = tmp_path / "run-1"
    _finish(reference, *arguments)
    assert committed_steps(reference) == committed_steps(tmp_path / "reference-1") != []
    _interrupt(output, "train 5", *arguments)
    assert not second.exists()
    job = safepoint(output, *TWO, program=tiny(output, *arguments, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for("the second training", lambda: read_events(second, "attempt_started"))
        job.output = second
        job.wait_for_mark("train 3")
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    assert read_events(output, "finished")
    assert read_events(second, "interrupted")[0]["saved"]
    _finish(output, *arguments)
    assert_same_run(output, reference)
    assert_same_run(second, tmp_path / "reference-1")
    # Both are at their end now; the second still begins from what the first has made.
    shutil.rmtree(second)
    _finish(output, *arguments)
    assert_same_run(second, tmp_path / "reference-1")


def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    """save_only_model=True is refused before the first step, with what to do."""
    output = tmp_path / "run"
    job = safepoint(output, program=tiny(output, *_settings(save_only_model=True)))
    with no_orphans(job):
        assert job.wait() == 2, job.text
    assert "save_only_model=True: a checkpoint without optimizer state cannot be resumed" in job.text
    assert "remove save_only_model from the script's TrainingArguments" in job.text
    assert not (output / "marks-0").exists()
    assert not committed_steps(output)


@pytest.fixture
def hub() -> FakeHub:
    with fake_hub() as hub:
        yield hub


def test_pushes_to_the_hub_are_the_scripts_own(hub: FakeHub, tmp_path: Path) -> None:
    """The same pushes as without Safepoint; an interruption pushes nothing."""
    arguments = (
        *("--save-strategy", "steps", "--save-steps", "4"),
        *_settings(push_to_hub=True, hub_model_id="somebody/model", hub_strategy="checkpoint", hub_always_push=True),
    )
    output = tmp_path / "run"
    _interrupt(output, "train 5", *arguments, **hub.variables)
    _finish(output, *arguments, **hub.variables)
    assert committed_steps(output)[-2:] == [12, 16]
    assert not hub.unknown
    pushed = [commit.message for commit in hub.commits if "step" in commit.message]
    steps = [4, 8, 12, 16]
    expected = [text for step in steps for text in _messages(step)]
    assert sorted(pushed) == sorted(expected)
    for commit in hub.commits:
        assert not any(path.startswith((".safepoint", "set-aside", "checkpoint-")) for path in commit.files)
    by_message = {commit.message: commit.files for commit in hub.commits}
    for step in (12, 16):
        weights = (output / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        model, checkpoint = (by_message[text] for text in _messages(step))
        assert model["model.safetensors"] == weights
        assert checkpoint["last-checkpoint/model.safetensors"] == weights
        assert {"last-checkpoint/optimizer.pt", "last-checkpoint/safepoint-manifest.json"} <= checkpoint.keys()


def _messages(step: int) -> tuple[str, str]:
    return f"Training in progress, step {step}", f"Training in progress, step {step}, checkpoint"
