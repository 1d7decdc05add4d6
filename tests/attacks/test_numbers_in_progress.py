"""Records of a hostile output folder with numbers that fit alone, and from which a larger number is computed."""

import itertools
import json
import string
from pathlib import Path
from typing import Any

import pytest

from safepoint.doctor.deadline import History, judge_grace, look_at_history
from safepoint.progress import metric_history
from safepoint.progress.metric_history import MetricReader, read_points
from safepoint.progress.record import State, read_progress
from safepoint.progress.tracker import ProgressTracker

_MOST = (1 << 63) - 1
_TIME = "2026-01-01T00:00:00.000Z"


def _record(folder: Path, **fields: Any) -> Path:
    path = folder / ".safepoint" / "progress.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"version": 1, "time": _TIME, "state": "training", "run_id": "r", "step": 20, **fields})
    )
    assert read_progress(path) is not None
    return path


@pytest.mark.parametrize("values", [{"step_s": 1e308, "pause_s": 1e308}, {"step_s": 1e300}, {"step_s": -1e308}])
def test_the_duration_of_a_step(values: dict[str, float], tmp_path: Path) -> None:
    """`safepoint doctor` ignores it."""
    _record(tmp_path, **values)
    history = look_at_history(tmp_path)
    assert history.step_s is None
    found = judge_grace(
        History(state_bytes=1 << 40, save_s=None, step_s=history.step_s),
        grace_s=30.0, margin_s=5.0, bytes_per_s=1e6,
    )  # fmt: skip
    assert found is not None
    assert "inf" not in found.fix


def test_repeated_steps(tmp_path: Path) -> None:
    """The run's own record stays readable."""
    path = _record(tmp_path, repeated_steps=_MOST, step=_MOST)
    tracker = ProgressTracker(is_first=True)
    tracker.begin(
        path, location="", run_id="r", attempt=2, samples_per_step=1, resumed_step=12, resumed_time=_TIME,
        resumed_bytes=1,
    )  # fmt: skip
    tracker.end(State.FINISHED)
    found = read_progress(path)
    assert found is not None
    assert (found.attempt, found.repeated_steps) == (2, _MOST)


# ---- metrics -----------------------------------------------------------------------------------------------------


def _line(num_values: int, step: int = 1) -> str:
    names = (
        "".join(one) for one in itertools.islice(itertools.product(string.ascii_lowercase, repeat=3), num_values)
    )
    values = dict.fromkeys(names, 1)
    return json.dumps({"time": "x", "attempt": 1, "step": step, "values": values}, separators=(",", ":")) + "\n"


def test_a_line_with_many_values(tmp_path: Path) -> None:
    """It is left out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(_line(600, 1) + _line(8000, 2) + _line(1, 3))
    assert [point.step for point in read_points(path)] == [1, 3]


def test_many_lines_with_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all points, the newest are read, until they have the greatest number of values together."""
    monkeypatch.setattr(metric_history, "_MOST_VALUES_READ", 2500)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(_line(600, step) for step in range(1, 9)))
    reader = MetricReader(path)
    assert [point.step for point in read_points(path)] == [5, 6, 7, 8] == [point.step for point in reader.read()]
    with path.open("a") as file:
        file.write(_line(600, 9))
    assert [point.step for point in reader.read()] == [6, 7, 8, 9]
