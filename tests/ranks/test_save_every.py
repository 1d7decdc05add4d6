"""Checkpoints by time: the first rank reads the clock, and all ranks save the same step."""

from datetime import datetime
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.jobs import no_orphans, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
TWO = ("--nproc-per-node", "2")
LOOP = Path(__file__).parent.parent / "programs" / "loop.py"


def test_a_trainer_saves_by_time(tmp_path: Path) -> None:
    """--save-every replaces the script's steps; the checkpoints have the interval that was set."""
    output = tmp_path / "run"
    program = tiny(output, "--max-steps", "60", "--step-ms", "50", "--save-strategy", "steps", "--save-steps", "1")
    job = safepoint(output, *TWO, "--save-every", "1s", program=program)
    with no_orphans(job):
        assert job.wait(200) == 0, job.text
    saved = job.events("saved")
    assert {event["trigger"] for event in saved} == {"periodic"}
    steps = [event["step"] for event in saved]
    times = [datetime.fromisoformat(job.events(name)[-1]["time"]) for name in ("attempt_started", "finished")]
    assert 2 <= len(steps) <= 2 + (times[1] - times[0]).total_seconds(), steps
    assert all(verify(path).is_valid for path in list_checkpoints(output))


def test_a_best_model_needs_checkpoints_of_its_own(tmp_path: Path) -> None:
    """By time, evaluated steps have no checkpoint: refused before the model is loaded."""
    output = tmp_path / "run"
    program = tiny(output, "--best", "--eval-strategy", "steps", "--save-strategy", "steps", "--save-steps", "5")
    job = safepoint(output, "--save-every", "10m", program=program)
    with no_orphans(job):
        assert job.wait() == 2
    assert "load_best_model_at_end" in job.text


@pytest.mark.long
def test_a_session_saves_by_time(tmp_path: Path) -> None:
    """--save-every replaces the session's `save_steps`."""
    output = tmp_path / "run"
    program = [str(LOOP), "--out", str(output), "--step-ms", "50", "--epochs", "12", "--save-steps", "1"]
    job = safepoint(output, *TWO, "--save-every", "1s", program=program)
    with no_orphans(job):
        assert job.wait(200) == 0, job.text
    assert 2 <= len(job.events("saved")) < 72, "of as many steps"
