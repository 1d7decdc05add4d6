"""What is known of a training, from what loop and engine have reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import clock
from safepoint.progress.record import Progress, State, read_progress
from safepoint.progress.tracker import ProgressTracker

MADE = "2026-03-01T12:00:00.000Z"


class Tracked:
    """Figures of a first rank whose clock is set by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.path = folder / "out" / ".safepoint" / "progress.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)
        self.figures = ProgressTracker(places=[folder / "job.json"], is_first=True, world_size=2)

    def begin(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "location": "",
            "run_id": "r1",
            "attempt": 1,
            "samples_per_step": 16,
            "resumed_step": None,
            "resumed_time": None,
            "resumed_bytes": None,
        }
        self.figures.begin(self.path, **(fields | changes))
        self.figures.loop_begins()

    def step(self, step: int, took_s: float) -> None:
        self.now_s += took_s
        self.figures.step_ends()
        self.figures.reached(step=step, max_steps=100, epoch=step / 50, num_epochs=2.0)
        self.figures.boundary_ends()

    def written(self) -> Progress:
        progress = read_progress(self.path)
        assert progress is not None
        return progress


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    return Tracked(tmp_path, monkeypatch)


def test_time_left_after_a_resume_is_of_this_attempt(tracked: Tracked) -> None:
    """However long the attempts before took: 50 steps that others have done are no pace."""
    tracked.begin(resumed_step=50, resumed_time=MADE)
    assert tracked.figures.now().remaining_s is None
    tracked.step(51, 9.0)
    assert tracked.figures.now().remaining_s is None
    tracked.step(52, 2.0)
    now = tracked.figures.now()
    assert (now.percent, now.remaining_s, now.samples_per_s) == (52.0, 96.0, 8.0)
    assert (now.resumed_step, now.safe_step, now.safe_time) == (50, 50, MADE)


def test_a_resumed_run_is_as_far_as_it_was_from_the_beginning(tracked: Tracked) -> None:
    """While the model is loaded, the total is what the last attempt has said; a new run knows none."""
    tracked.begin()
    tracked.step(30, 1.0)
    tracked.figures.end(State.INTERRUPTED, "stopped")
    for run_id, percent in (("r1", 30.0), ("r2", None)):
        again = ProgressTracker(is_first=True)
        again.begin(
            tracked.path,
            location="",
            run_id=run_id,
            attempt=2,
            samples_per_step=16,
            resumed_step=30,
            resumed_time=MADE,
            resumed_bytes=10,
        )
        assert (again.now().state, again.now().percent, again.now().message) == (State.STARTING, percent, "")


def test_steps_that_are_done_again_are_counted_over_all_attempts(tracked: Tracked) -> None:
    """Those between the checkpoint and the last report. Without a record of the start before, they are unknown."""
    tracked.begin()
    tracked.step(30, 1.0)
    tracked.figures.end(State.FAILED)
    assert tracked.written().repeated_steps == 0
    for attempt, resumed, step, expected in ((2, 20, 35, 10), (3, 35, 50, 10), (4, 45, 46, 15)):
        tracked.begin(attempt=attempt, resumed_step=resumed, resumed_time=MADE)
        tracked.step(step, 1.0)
        tracked.figures.end(State.INTERRUPTED)
        assert tracked.written().repeated_steps == expected
    tracked.path.unlink()
    for _ in range(2):
        tracked.begin(attempt=5, resumed_step=46, resumed_time=MADE)
        tracked.figures.end(State.INTERRUPTED)
        assert tracked.written().repeated_steps is None


def test_metrics_are_of_the_training_or_of_evaluations(tracked: Tracked) -> None:
    """By their names; a number that is not finite is kept as None, other values are ignored."""
    tracked.begin()
    tracked.figures.measured({"loss": 2.0, "grad_norm": float("nan"), "name": "x", "flag": True, "reward/mean": 1})
    tracked.figures.measured({"eval_loss": 3.0, "val_acc": 0.5, "test/f1": 0.25})
    tracked.figures.measured({"loss": float("inf")})
    now = tracked.figures.now()
    assert now.loss is None
    assert now.train_metrics == {"grad_norm": None, "reward/mean": 1.0}
    assert now.eval_metrics == {"eval_loss": 3.0, "val_acc": 0.5, "test/f1": 0.25}
    assert json.loads(now.to_bytes())["loss"] is None


def test_saves_are_counted_and_predicted(tracked: Tracked) -> None:
    """By size before the first one, by the last one from then on."""
    tracked.begin(resumed_bytes=4 * 10**9)
    tracked.figures.expect_save(10)
    before = tracked.figures.now().saves
    assert (before.expected_s, before.is_measured) == (pytest.approx(20.0), False)
    tracked.figures.saved(10, time=MADE, stall_s=0.5, durable_s=8.0, size_bytes=100)
    tracked.figures.not_saved()
    tracked.figures.saved(20, time=MADE, stall_s=1.5, durable_s=6.0, size_bytes=200)
    now = tracked.figures.now()
    assert (now.safe_step, now.safe_time) == (20, MADE)
    saves = now.saves
    assert (saves.count, saves.unsaved, saves.last_stall_s, saves.mean_stall_s) == (2, 1, 1.5, 1.0)
    assert (saves.last_durable_s, saves.last_bytes, saves.expected_s, saves.is_measured) == (6.0, 200, 6.0, True)


def test_states_follow_each_other(tracked: Tracked) -> None:
    """An evaluation ends in what was before it, and an end stays one, whatever comes to its own end after it."""
    tracked.begin()
    with tracked.figures.during(State.EVALUATING):
        assert tracked.figures.state is State.EVALUATING
    assert tracked.figures.state is State.TRAINING
    with tracked.figures.during(State.SAVING):
        tracked.figures.end(State.INTERRUPTED, "stopped")
    assert tracked.figures.state is State.INTERRUPTED


def test_an_end_is_written_before_it_returns(tracked: Tracked, tmp_path: Path) -> None:
    """Everywhere; the next training of the same process starts from zero."""
    tracked.begin()
    tracked.step(7, 1.0)
    tracked.figures.end(State.INTERRUPTED, "stopped at step 7")
    for path in (tracked.path, tmp_path / "job.json"):
        progress = read_progress(path)
        assert progress is not None
        assert (progress.state, progress.step, progress.message) == (State.INTERRUPTED, 7, "stopped at step 7")
    assert tracked.written().output_dir == str(tracked.path.parent.parent)
    tracked.begin(run_id="r2")
    tracked.figures.end(State.FINISHED)
    assert (tracked.written().run_id, tracked.written().step, tracked.written().percent) == ("r2", 0, 100.0)


def test_an_early_end_says_so(tracked: Tracked) -> None:
    """In the record, which has no other message then."""
    tracked.begin()
    tracked.figures.reached(step=5, max_steps=10, epoch=0.5, num_epochs=1.0)
    tracked.figures.end(State.FINISHED)
    assert (tracked.written().percent, tracked.written().message) == (
        50.0,
        "training stopped early, at step 5 of 10",
    )


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    """They may tell all the same."""
    figures = ProgressTracker(places=[tmp_path / "job.json"], is_first=False)
    path = tmp_path / "out" / ".safepoint" / "progress.json"
    figures.begin(
        path,
        location="",
        run_id="r",
        attempt=1,
        samples_per_step=1,
        resumed_step=None,
        resumed_time=None,
        resumed_bytes=None,
    )
    figures.measured({"loss": 1.0})
    figures.reached(step=1, max_steps=2, epoch=0.5, num_epochs=1.0)
    assert not figures.is_due()
    figures.end(State.FINISHED)
    assert list(tmp_path.iterdir()) == []
