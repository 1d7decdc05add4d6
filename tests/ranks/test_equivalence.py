"""Interrupted and resumed training equals uninterrupted training, bit for bit (promise P8)."""

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.equality import assert_same_run
from tests.support.jobs import committed_steps, holdfast, no_orphans, read_events, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SHAPES = {
    "steps": "--samples 92 --epochs 3 --grad-accum 2 --eval-strategy steps --eval-steps 4 --logging-steps 3",
    "epochs": (
        "--samples 92 --epochs 3 --grad-accum 2 --eval-strategy epoch --save-strategy epoch --best "
        "--logging-strategy epoch --workers 1"
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference") / shape
    job = holdfast(output, "--nproc-per-node", "2", program=tiny(output, *SHAPES[shape].split()))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    return output


@pytest.mark.parametrize("num_interruptions", [1, 3])
def test_interrupted_run_equals_uninterrupted(
    shape: str, reference: Path, num_interruptions: int, tmp_path: Path
) -> None:
    """After SIGTERM to one rank at random steps, weights, optimizer and logged figures are the reference's."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    # Of 36; the progress file may be half a second, ten steps, behind.
    steps = sorted(random.Random(seed).sample(range(1, 25), num_interruptions))
    output = tmp_path / "run"
    program = tiny(output, *SHAPES[shape].split(), "--step-ms", "50", "--eval-ms", "5")
    for attempt, step in enumerate(steps, start=1):
        job = holdfast(output, "--nproc-per-node", "2", program=program)
        with no_orphans(job):
            job.wait_for_event("attempt_started", count=attempt)
            job.wait_for_step(step)
            os.kill(job.rank_pids()[attempt % 2], signal.SIGTERM)
            assert job.wait() == 75, job.text
        assert read_events(output, "interrupted")[-1]["saved"]
        assert not (output / "final").exists()
        assert committed_steps(output)
    job = holdfast(output, "--nproc-per-node", "2", program=program)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)
    saved = [(event["step"], attempt) for attempt, event in _with_attempt(output) if event["event"] == "saved"]
    assert len(saved) == len(set(saved)), "a step was saved twice in one attempt"


def _with_attempt(output: Path):
    attempt = 0
    for event in read_events(output):
        attempt = event["attempt"] if event["event"] == "attempt_started" else attempt
        yield attempt, event
