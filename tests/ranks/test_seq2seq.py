"""Seq2SeqTrainer with `predict_with_generate`, stopped while it generates in an evaluation."""

import os
import signal
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.equality import assert_same_run
from tests.support.jobs import TINY, Job, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]


def _start(output: Path, *options: str, token_s: float = 0) -> Job:
    program = [str(TINY.parent / "generating.py"), "--out", str(output), "--token-s", str(token_s)]
    return safepoint(output, "--nproc-per-node", "2", *options, program=program)


def _interrupt(output: Path, mark: str, *options: str, token_s: float, all_ranks: bool = False) -> None:
    attempts = len(read_events(output, "attempt_started"))
    for path in output.glob("marks-*"):
        path.unlink()
    job = _start(output, *options, token_s=token_s)
    with no_orphans(job):
        job.wait_for_event("attempt_started", count=attempts + 1)
        job.wait_for_mark(mark, rank=1)
        if all_ranks:
            job.signal()
        else:
            os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text


def test_a_run_is_stopped_while_it_generates(tmp_path: Path) -> None:
    """Between two batches of an evaluation, and inside a batch that is longer than the grace period."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = _start(reference)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    # Two batches on each rank; the evaluation is left after the first.
    _interrupt(output, "generation 4", token_s=0.1)
    # The next start repeats it, and a batch takes longer than there is time.
    short = ("--grace", "5", "--snapshot-steps", "1")
    _interrupt(output, "generation 4", *short, token_s=1, all_ranks=True)
    assert [event["step"] for event in read_events(output, "interrupted")] == [4, 4]
    # The same where the step before the evaluation is in memory only: it is taken again.
    _interrupt(output, "generation 8", *short, token_s=1, all_ranks=True)
    assert read_events(output, "interrupted")[-1]["step"] in {7, 8}
    for checkpoint in list_checkpoints(output):
        assert verify(checkpoint).is_valid
    job = _start(output)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert_same_run(output, reference)
