"""When a checkpoint is due by the clock, and how often it pays to have one."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import clock
from safepoint.training.engine.save_clock import Losses, SaveClock, best_interval_s, read_losses

HOUR_S = 3600.0


class Time:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "monotonic_s", lambda: time.now_s)
    return time


def test_every_so_often(time: Time) -> None:
    """Counted from the first step, and once for each time; any save restarts the interval."""
    saves = SaveClock("10m")
    time.now_s += 5000  # the model loads
    assert not saves.is_due()
    time.now_s += 599
    assert not saves.is_due()
    time.now_s += 1
    assert saves.is_due()
    assert not saves.is_due(), "yes is said once"
    time.now_s += 300
    saves.saved(stall_s=9, writing_s=None)
    time.now_s += 599
    assert not saves.is_due()
    time.now_s += 1
    assert saves.is_due()


def test_without_a_setting_nothing_is_due(time: Time) -> None:
    """Nor is the past looked at."""
    saves = SaveClock(None, look_back=lambda: pytest.fail("it is not needed"))
    for _ in range(3):
        time.now_s += 1e9
        assert not saves.is_due()


def test_auto_follows_what_a_save_costs(time: Time) -> None:
    """Assumed first, measured then; the disk has the time to write what it gets."""
    saves = SaveClock("auto")
    saves.is_due()
    assert saves.interval_s == pytest.approx(best_interval_s(1.0, 4 * HOUR_S))
    saves.saved(stall_s=0.01, writing_s=None)
    assert saves.interval_s == pytest.approx(best_interval_s(0.01, 4 * HOUR_S))
    saves.saved(stall_s=0.01, writing_s=50)
    assert saves.interval_s == 100
    for _ in range(20):
        saves.saved(stall_s=60, writing_s=60)
    assert saves.interval_s == pytest.approx(best_interval_s(60, 4 * HOUR_S), rel=0.01)


def test_auto_learns_from_losses(time: Time) -> None:
    """A run that loses work often saves more often, and one that never does saves less and less."""
    lucky, unlucky = SaveClock("auto"), SaveClock("auto", lambda: Losses(trained_s=4 * HOUR_S, count=7))
    assert not lucky.is_due()
    assert not unlucky.is_due()
    assert unlucky.interval_s == pytest.approx(best_interval_s(1.0, HOUR_S))
    before_s = lucky.interval_s
    time.now_s += 100 * HOUR_S
    assert lucky.interval_s == pytest.approx(best_interval_s(1.0, 104 * HOUR_S))
    assert lucky.interval_s > 4 * before_s


def waste(interval_s: float, stall_s: float, between_s: float, seed: int) -> float:
    """Of a simulated training with exponential losses: seconds for each second of work."""
    generator = random.Random(seed)
    work_s = 400 * between_s
    done_s = took_s = 0.0
    while done_s < work_s:
        left_s = generator.expovariate(1 / between_s)
        num_saved = int(left_s // (interval_s + stall_s))
        done_s += num_saved * interval_s
        took_s += left_s
    return took_s / done_s


@pytest.mark.parametrize(("stall_s", "between_s"), [(5.0, HOUR_S), (60.0, HOUR_S), (300.0, 2 * HOUR_S)])
def test_no_other_interval_wastes_less(stall_s: float, between_s: float) -> None:
    """Against a simulation: half or twice as often is worse, and a little off is no better."""
    best_s = best_interval_s(stall_s, between_s)
    at_best = waste(best_s, stall_s, between_s, seed=3)
    assert at_best < waste(best_s / 2.5, stall_s, between_s, seed=3)
    assert at_best < waste(best_s * 2.5, stall_s, between_s, seed=3)
    for factor in (0.8, 1.25):
        assert at_best < 1.005 * waste(best_s * factor, stall_s, between_s, seed=3)


def test_the_formula_at_its_ends() -> None:
    """Young's for cheap checkpoints, and the time between losses for those that take longer than that."""
    assert best_interval_s(0.1, HOUR_S) == pytest.approx(math.sqrt(2 * 0.1 * HOUR_S), rel=0.01)
    assert best_interval_s(100.0, 50.0) == 50.0
    assert best_interval_s(99.99, 50.0) > 0


def stream(path: Path, *records: tuple[str, int, dict[str, Any]]) -> Path:
    lines = [
        json.dumps({"time": f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:00.000Z", "event": event, **fields})
        for event, minute, fields in records
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_only_what_was_lost_counts(tmp_path: Path) -> None:
    """A stop with a checkpoint and an end are none; a kill, and a stop that was not saved, are."""
    path = stream(
        tmp_path / "events.jsonl",
        ("attempt_started", 0, {}),
        ("saved", 10, {}),
        ("interrupted", 20, {"saved": True}),
        ("attempt_started", 100, {}),
        ("saved", 110, {}),
        ("attempt_started", 200, {}),
        ("interrupted", 230, {"saved": False}),
        ("attempt_started", 300, {}),
    )
    assert read_losses(path) == Losses(trained_s=60 * (20 + 10 + 30), count=2)


def test_a_stream_may_hold_anything(tmp_path: Path) -> None:
    """None, half lines, and what is no record: as if it were not there."""
    assert read_losses(tmp_path / "none") == Losses()
    path = stream(
        tmp_path / "events.jsonl", ("attempt_started", 0, {}), ("saved", 60, {}), ("attempt_started", 90, {})
    )
    text = path.read_text().replace("\n", '\n[1]\n{"event": 3}\nnull\n\xff{"time":\n')
    path.write_text(text + '{"time": "2026-01-', encoding="latin-1")
    assert read_losses(path) == Losses(trained_s=HOUR_S, count=1)
