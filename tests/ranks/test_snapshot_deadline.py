"""A deadline shorter than the running step: the newest snapshot is committed, and the next start resumes from it."""

import os
import signal
from pathlib import Path

import pytest

from safepoint.checkpoint.format.verify import verify
from tests.support.jobs import Job, committed_steps, no_orphans, read_events, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_SLOW = ("--grad-accum", "1", "--step-ms", "20000", "--max-steps", "5")


def _stop(job: Job, receiver: str) -> None:
    os.kill(job.process.pid if receiver == "launcher" else job.rank_pids()[-1], signal.SIGTERM)


def _assert_goes_on(output: Path, step: int, *options: str) -> None:
    job = safepoint(output, *options, program=tiny(output, "--grad-accum", "1", "--max-steps", "5"))
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "resumed")] == [step]
    assert [event["step"] for event in read_events(output, "finished")] == [5]


@pytest.mark.parametrize(
    ("pace", "num_ranks", "receiver"),
    [
        # Two steps without a pause, then one far slower than they made believe: found out when time is almost up.
        pytest.param("sudden", 1, "launcher", marks=pytest.mark.long),
        ("sudden", 2, "rank"),
        # Every step is too long: found out at once.
        *(
            pytest.param("steady", num_ranks, receiver, marks=pytest.mark.long)
            for num_ranks in (1, 2)
            for receiver in ("launcher", "rank")
        ),
    ],
)
def test_newest_snapshot_is_committed_in_time(num_ranks: int, receiver: str, pace: str, tmp_path: Path) -> None:
    """A step of 20 s and a grace period of 5 s: exit code 75, with the snapshot before the step."""
    output = tmp_path / "run"
    ranks = ("--nproc-per-node", str(num_ranks))
    done = 2 if pace == "sudden" else 1
    program = tiny(output, *_SLOW, *(("--slow-from", "2") if pace == "sudden" else ()))
    job = safepoint(output, *ranks, "--grace", "5", "--snapshot-steps", "1", program=program)
    with no_orphans(job):
        for rank in range(num_ranks):
            job.wait_for_mark(f"train {done}", rank=rank)
        _stop(job, receiver)
        assert job.wait(20) == 75, job.text
    [abandoned] = read_events(output, "step_abandoned")
    assert (abandoned["step"], abandoned["snapshot_step"]) == (done + 1, done)
    assert f"step {done + 1} is given up" in job.text
    assert committed_steps(output) == [done]
    verdict = verify(output / f"checkpoint-{done}")
    assert verdict.is_valid, verdict.faults
    [interrupted] = read_events(output, "interrupted")
    assert (interrupted["step"], interrupted["saved"]) == (done, True)
    _assert_goes_on(output, done, *ranks)


@pytest.mark.long
def test_a_durable_snapshot_needs_no_second_commit(tmp_path: Path) -> None:
    """The newest snapshot is already a checkpoint: the ranks exit without another commit."""
    output = tmp_path / "run"
    program = tiny(output, *_SLOW, "--slow-from", "2", "--save-strategy", "steps", "--save-steps", "2")
    job = safepoint(output, "--nproc-per-node", "2", "--grace", "5", "--snapshot-steps", "1", program=program)
    with no_orphans(job):
        job.wait_for_mark("train 2", rank=1)
        job.wait_for_event("saved", step=2)
        _stop(job, "rank")
        assert job.wait(20) == 75, job.text
    assert [event["snapshot_step"] for event in read_events(output, "step_abandoned")] == [2]
    assert [(event["step"], event["trigger"]) for event in read_events(output, "saved")] == [(2, "periodic")]
    assert committed_steps(output) == [2]
