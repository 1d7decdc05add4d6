"""Hand-written loops in a session: after a stop or a kill at any point, the result is bit-equal."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from tests.support.checkpoints import commit, prepared
from tests.support.equality import finals, same
from tests.support.jobs import Job, committed_steps, environment, no_orphans, read_events, safepoint
from tests.support.moto_server import MotoServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

LOOP = Path(__file__).parent.parent / "programs" / "loop.py"
Start = Callable[..., Job]


def _plain(output: Path, *arguments: str) -> Job:
    """Start a script with plain Python."""
    command = [sys.executable, str(LOOP), "--out", str(output), *arguments]
    return Job(command, output, log=output.parent / f"{output.name}.log", env=environment())


def _launched(output: Path, *arguments: str) -> Job:
    return safepoint(output, program=[str(LOOP), "--out", str(output), *arguments])


def _two_ranks(output: Path, *arguments: str) -> Job:
    return safepoint(output, "--nproc-per-node", "2", program=[str(LOOP), "--out", str(output), *arguments])


def _accelerated(output: Path, *arguments: str) -> Job:
    program = [str(LOOP), "--accelerate", "--out", str(output), *arguments]
    return safepoint(output, "--nproc-per-node", "2", program=program)


def _accelerated_alone(output: Path, *arguments: str) -> Job:
    return safepoint(output, program=[str(LOOP), "--accelerate", "--out", str(output), *arguments])


_LONG = {"safepoint run", "two ranks", "accelerate", "accelerate alone"}
STARTS: dict[str, tuple[Start, int]] = {
    "python": (_plain, 1),
    "safepoint run": (_launched, 1),
    "two ranks": (_two_ranks, 2),
    "accelerate": (_accelerated, 2),
    "accelerate alone": (_accelerated_alone, 1),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long if way in _LONG else []) for way in STARTS])
def test_stopped_and_killed_it_ends_with_the_same_bits(way: str, tmp_path: Path) -> None:
    """A signal in the first epoch, SIGKILL of all in the second; the same command each time."""
    start, num_ranks = STARTS[way]
    reference = start(tmp_path / "reference", "--step-ms", "0")
    with no_orphans(reference):
        assert reference.wait() == 0, reference.text
    output = tmp_path / "run"
    stopped = start(output, "--save-steps", "3")
    with no_orphans(stopped):
        stopped.wait_for_mark("train 4")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 75, stopped.text
    [stop] = read_events(output, "stop_requested")
    assert committed_steps(output)[-1] == stop["step"]
    killed = start(output, "--save-steps", "3")
    with no_orphans(killed):
        killed.wait_for_mark("train 10")
        killed.wait_for_event("saved", trigger="periodic", step=9)
        killed.kill_everything()
    # No step before the stop was done twice, and none of those after it was left out.
    marks = (output / "marks-0").read_text().split("\n")[:-1]
    assert marks[: stop["step"] + 1] == [f"train {step}" for step in range(stop["step"])] + [f"train {stop['step']}"]
    last = start(output, "--save-steps", "3")
    with no_orphans(last):
        assert last.wait() == 0, last.text
    resumed = read_events(output, "resumed")
    assert resumed[0]["step"] == stop["step"]
    assert resumed[1]["step"] >= 9
    assert read_events(output, "finished")[0]["step"] == 18
    for mine, expected in zip(finals(output, num_ranks), finals(tmp_path / "reference", num_ranks), strict=True):
        assert same(mine, expected)


@pytest.mark.parametrize("way", [pytest.param("accelerate", marks=pytest.mark.long), "python"])
def test_adapters_end_with_the_same_bits(way: str, tmp_path: Path) -> None:
    """The checkpoint has no weight of the frozen model; `final/` has all of them."""
    start, num_ranks = STARTS[way]
    reference = start(tmp_path / "reference", "--lora", "--step-ms", "0")
    with no_orphans(reference):
        assert reference.wait() == 0, reference.text
    output = tmp_path / "run"
    stopped = start(output, "--lora")
    with no_orphans(stopped):
        stopped.wait_for_mark("train 4")
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 75, stopped.text
    [step] = committed_steps(output)
    checkpoint = output / f"checkpoint-{step}"
    weights = checkpoint / "model.safetensors"
    state = load_file(weights) if weights.exists() else torch.load(checkpoint / "model.pt", weights_only=True)
    assert {key for key in state if "lora_" not in key} == {
        f"base_model.model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    last = start(output, "--lora", "--step-ms", "0")
    with no_orphans(last):
        assert last.wait() == 0, last.text
    for mine, expected in zip(finals(output, num_ranks), finals(tmp_path / "reference", num_ranks), strict=True):
        assert same(mine, expected)


def test_every_session_of_a_script_saves_its_end(tmp_path: Path) -> None:
    """Each session saves its end, also after another one that saved the same step."""
    output = tmp_path / "run"
    command = [sys.executable, str(LOOP.parent / "folds.py"), "--out", str(output)]
    job = Job(command, output, log=tmp_path / "run.log", env=environment())
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [committed_steps(output / fold) for fold in ("0", "1")] == [[4], [4]]


def test_plain_python_waits_for_the_store(moto: MotoServer, tmp_path: Path) -> None:
    """When the script ends, the last checkpoint and the final model are in the store."""
    output, prefix = tmp_path / "run", f"plain-{uuid.uuid4().hex}"
    where = {"SAFEPOINT_OUTPUT_DIR": str(moto.location(prefix)), "SAFEPOINT_LOCAL_DIR": str(output)}
    command = [sys.executable, str(LOOP), "--out", str(output), "--step-ms", "0", "--epochs", "1"]
    job = Job(command, output, log=tmp_path / "run.log", env=environment(**moto.variables, **where))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    found = {item.key for item in moto.store(prefix).list()}
    assert {f"{folder}/model.pt" for folder in ("checkpoint-6", "final")} < found
    assert {f"{folder}/{MANIFEST_NAME}" for folder in ("checkpoint-6", "final")} < found


@pytest.mark.long
def test_a_finished_run_does_nothing(tmp_path: Path) -> None:
    """The same command again loads the end and exits."""
    output = tmp_path / "run"
    first = _plain(output, "--step-ms", "0")
    with no_orphans(first):
        assert first.wait() == 0, first.text
    marks = (output / "marks-0").read_text()
    again = _plain(output, "--step-ms", "0")
    with no_orphans(again):
        assert again.wait() == 0, again.text
    assert (output / "marks-0").read_text() == marks
    assert committed_steps(output) == [18]


def test_a_killed_rank_goes_on_from_memory(tmp_path: Path) -> None:
    """With a snapshot of every step, a restart loses at most one step."""
    output = tmp_path / "run"
    program = [str(LOOP), "--out", str(output), "--step-ms", "100"]
    job = safepoint(output, "--nproc-per-node", "2", "--snapshot-steps", "1", program=program)
    with no_orphans(job):
        job.wait_for_mark("train 7")
        [*_, victim] = job.rank_pids()
        os.kill(victim, signal.SIGKILL)
        resumed = job.wait_for_event("resumed_from_memory")
        assert job.wait() == 0, job.text
    assert resumed["step"] >= 6
    assert read_events(output, "finished")[0]["step"] == 18


@pytest.mark.long
def test_options_say_when_to_save_and_what_stays(tmp_path: Path) -> None:
    """The last step of each epoch is saved, and only the newest checkpoint stays."""
    output = tmp_path / "run"
    program = [str(LOOP), "--out", str(output), "--step-ms", "0", "--save-steps", "4"]
    job = safepoint(output, "--save-strategy", "epoch", "--save-total-limit", "1", program=program)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "saved")] == [6, 12, 18]
    assert committed_steps(output) == [18]


@pytest.mark.long
def test_accelerate_on_another_number_of_ranks(tmp_path: Path) -> None:
    """After one epoch on two ranks, the run continues on one rank for two epochs."""
    output = tmp_path / "run"
    for ranks, epochs in (("2", "1"), ("1", "3")):
        program = [str(LOOP), "--accelerate", "--out", str(output), "--step-ms", "0", "--epochs", epochs]
        job = safepoint(output, "--nproc-per-node", ranks, program=program)
        with no_orphans(job):
            assert job.wait() == 0, job.text
    assert read_events(output, "resumed")[-1]["step"] == 6
    assert committed_steps(output) == [6, 18]


def test_mistakes_are_said(tmp_path: Path) -> None:
    """Each mistake has a message with what to do, and no traceback."""
    commit(prepared(tmp_path / "foreign"), 10)
    program = [sys.executable, str(LOOP.with_name("mistakes.py")), str(tmp_path)]
    for part in ("first", "mistakes"):
        done = subprocess.run([*program, part], env=environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["no data"].startswith("USAGE: the session has no data")
    assert said["no step"].startswith("USAGE: nothing of this run was saved")
    assert done.stderr.count("the optimizer has stepped, but run.step() was not called, so nothing is saved") == 1
    changed = (
        "CONFLICT: model of checkpoint-3 differs from this script's: weight is (1, 4) in the checkpoint and (1, 5) "
        "in the script"
    )
    assert said["another model"].startswith(changed)
    assert said["another loop"].startswith("CONFLICT: checkpoint-10 was not written by a session")


@pytest.mark.long
def test_a_store_is_tried_before_anything_is_loaded(tmp_path: Path) -> None:
    """An unreachable server is reported within seconds, before anything is loaded."""
    options = ("--output-dir", "s3://checkpoints/run", "--local-dir", str(tmp_path / "run"))
    variables = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
    }
    job = safepoint(tmp_path / "run", *options, program=[str(LOOP), "--out", str(tmp_path / "run")], **variables)
    with no_orphans(job):
        assert job.wait() == 13, job.text
    assert "s3://checkpoints/run cannot be used" in job.text
    assert not read_events(tmp_path / "run", "attempt_started")
