"""The pace of an attempt: what steps take, whatever comes between them."""

import pytest

from safepoint.estimates.pace import Pace


class Clocked:
    """A pace, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.now_s = 100.0
        self.pace.begins(self.now_s)

    def step(self, step_s: float, boundary_s: float = 0.0) -> None:
        self.now_s += step_s
        self.pace.step_ends(self.now_s)
        self.now_s += boundary_s
        self.pace.boundary_ends(self.now_s)


def test_nothing_is_known_before_two_steps() -> None:
    """The first step is cold, and says nothing of the others."""
    run = Clocked()
    assert run.pace.step_s is None
    run.step(30.0)
    assert run.pace.step_s is None
    run.step(2.0)
    assert run.pace.step_s == pytest.approx(2.0)


def test_a_single_evaluation_or_save_does_not_count() -> None:
    """Two steps after a resume an evaluation of a minute: the next ones are not going to take half a minute each."""
    run = Clocked()
    run.step(5.0)
    run.step(2.0, boundary_s=60.0)
    run.step(2.0)
    assert run.pace.step_s == pytest.approx(2.0)
    assert run.pace.pause_s == 0.0


def test_what_comes_again_counts_by_how_often_it_came() -> None:
    """Ten seconds every five steps are two for each step; an end of an epoch is two boundaries at one step."""
    run = Clocked()
    for number in range(1, 21):
        run.step(2.0, boundary_s=4.0 if number % 5 == 0 else 0.0)
        if number % 5 == 0:
            run.now_s += 6.0
            run.pace.boundary_ends(run.now_s)
    assert run.pace.step_s == pytest.approx(2.0)
    assert run.pace.pause_s == pytest.approx(2.0)


def test_what_is_short_belongs_to_the_step() -> None:
    """Log lines and callbacks come with every step, and its time."""
    run = Clocked()
    for _ in range(10):
        run.step(2.0, boundary_s=0.1)
    assert run.pace.step_s == pytest.approx(2.1)
    assert run.pace.pause_s == 0.0


def test_it_follows_a_change() -> None:
    """After some steps only the new pace counts."""
    run = Clocked()
    for _ in range(100):
        run.step(1.0)
    for _ in range(64):
        run.step(3.0)
    assert run.pace.step_s == pytest.approx(3.0)


def test_what_an_earlier_attempt_has_left_is_no_pause() -> None:
    """An evaluation that is caught up before the first step, and one after the second: they are no interval."""
    run = Clocked()
    run.now_s += 60.0
    run.pace.boundary_ends(run.now_s)
    run.step(1.0)
    run.step(1.0, boundary_s=60.0)
    run.step(1.0)
    assert run.pace.step_s == pytest.approx(1.0)
    assert run.pace.pause_s == 0.0
