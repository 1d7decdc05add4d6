"""An interrupted and resumed training equals an uninterrupted one, bit for bit (promise P8).

The uninterrupted one is made once, so that programs that are copied are compared with those that are new processes.
"""

import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.equality import assert_same_run
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400), pytest.mark.usefixtures("both_ways")]

SHAPES = {
    "steps": "--samples 92 --epochs 3 --grad-accum 2 --eval-strategy steps --eval-steps 4 --logging-steps 3",
    "epochs": (
        "--samples 92 --epochs 3 --grad-accum 2 --eval-strategy epoch --save-strategy epoch --best "
        "--logging-strategy epoch --workers 1"
    ),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name == "epochs" else []) for name in SHAPES]
)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference") / shape
    job = safepoint(output, "--nproc-per-node", "2", program=tiny(output, *SHAPES[shape].split()))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    return output


# Of 36 steps, 12 in an epoch; the progress file may be half a second, ten steps, behind.
STOPS = {
    ("steps", "once"): [("step", (1, 24))],
    ("epochs", "once"): [("step", (1, 24))],
    ("steps", "often"): [("step", (1, 8)), ("evaluation", (20, 20)), ("step", (22, 24))],
    # From the checkpoint of an epoch's end, into the middle of the next, to the last evaluation of all.
    ("epochs", "often"): [("saved", (12, 12)), ("step", (13, 18)), ("evaluation", (36, 36))],
}


@pytest.mark.parametrize("often", [pytest.param("once", marks=pytest.mark.long), "often"])
def test_interrupted_run_equals_uninterrupted(shape: str, reference: Path, often: str, tmp_path: Path) -> None:
    """After SIGTERM to one rank, or SIGKILL to all after a save, the result equals the reference."""
    seed = int(os.environ.get("SAFEPOINT_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"SAFEPOINT_TEST_SEED={seed}")
    draw = random.Random(seed)
    output = tmp_path / "run"
    program = tiny(output, *SHAPES[shape].split(), "--step-ms", "50", "--eval-ms", "100")
    for attempt, (where, between) in enumerate(STOPS[shape, often], start=1):
        step = draw.randint(*between)
        job = safepoint(output, "--nproc-per-node", "2", program=program)
        with no_orphans(job):
            job.wait_for_event("attempt_started", count=attempt)
            _stop(job, where, step, rank=attempt % 2)
        assert not (output / "final").exists()
        assert committed_steps(output)
    job = safepoint(output, "--nproc-per-node", "2", program=program)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)
    # Once per attempt and step; an evaluation that was left for the next start belongs into the checkpoint.
    saved = [(event["step"], attempt) for attempt, event in _with_attempt(output) if event["event"] == "saved"]
    assert len(saved) == len(set(saved)), "a step was saved twice in one attempt"


def _stop(job: Job, where: str, step: int, *, rank: int) -> None:
    if where == "saved":
        job.wait_for_event("saved", step=step)
        job.kill_everything()
        return
    if where == "evaluation":
        job.wait_for_mark(f"eval {step}", rank=rank)
    else:
        job.wait_for_step(step)
    os.kill(job.rank_pids()[rank], signal.SIGTERM)
    assert job.wait() == 75, job.text
    assert job.events("interrupted")[-1]["saved"]


def _with_attempt(output: Path):
    attempt = 0
    for event in read_events(output):
        attempt = event["attempt"] if event["event"] == "attempt_started" else attempt
        yield attempt, event


@pytest.mark.long
def test_experts_that_are_saved_one_by_one(tmp_path: Path) -> None:
    """The Trainer alone would not find the experts in a checkpoint, and would train the script's."""
    options = ("--experts", "4", "--grad-accum", "1", "--epochs", "1", "--logging-steps", "1")
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = safepoint(reference, program=tiny(reference, *options))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    job = safepoint(output, program=tiny(output, *options, "--step-ms", "50"))
    with no_orphans(job):
        job.wait_for_step(5)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75, job.text
    job = safepoint(output, program=tiny(output, *options, "--model-seed", "2"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert_same_run(output, reference)
