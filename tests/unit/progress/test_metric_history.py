"""The metrics over the steps: what is kept, what an attempt replaces, and what a hostile file can do."""

import itertools
from pathlib import Path

import pytest

from safepoint.progress import metric_history
from safepoint.progress.metric_history import MetricHistory, MetricReader, current_points, point_of, read_points
from safepoint.progress.record import Progress, State


def report(step: int, attempt: int = 1, **fields: object) -> Progress:
    time = f"2026-03-01T12:00:00.{step % 1000:03d}Z"
    values = {"loss": 2.0 / (step + 1), "train_metrics": {"lr": 0.1}} | fields
    return Progress(time=time, state=State.TRAINING, step=step, attempt=attempt, **values)  # pyright: ignore


def test_a_point_has_the_finite_values(tmp_path: Path) -> None:
    """The loss, the pace and all metrics; a value that is not finite is null in the progress, and left out here."""
    point = point_of(report(3, step_s=0.5, train_metrics={"lr": 0.1, "norm": None}, eval_metrics={"eval_loss": 2.5}))
    assert dict(point.values) == {"loss": 0.5, "steps_per_s": 2.0, "lr": 0.1, "eval_loss": 2.5}
    history = MetricHistory([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    history.add(report(3))
    history.add(report(3))
    assert len(read_points(tmp_path / "a.jsonl")) == len(read_points(tmp_path / "b.jsonl")) == 1


def test_a_full_file_is_thinned_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand steps give few points at about one distance, also when the attempt changes."""
    monkeypatch.setattr(metric_history, "MOST_POINTS", 64)
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, range(1, 5001)), (2, range(5001, 10001))):
        history = MetricHistory([path])
        for step in steps:
            history.add(report(step, attempt))
    points = current_points(read_points(path))
    gaps = [after.step - before.step for before, after in itertools.pairwise(points)]
    assert 30 <= len(points) <= 64
    assert points[-1].step > 9500
    assert max(gaps) <= 8 * min(gaps)


def test_repeated_steps_replace_those_of_earlier_attempts(tmp_path: Path) -> None:
    """A resume from step 10 after step 15 leaves one value for each step."""
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, range(1, 16)), (2, range(11, 21))):
        history = MetricHistory([path])
        for step in steps:
            history.add(report(step, attempt))
    points = current_points(read_points(path))
    assert [point.step for point in points] == list(range(1, 21))
    assert [point.attempt for point in points] == [1] * 10 + [2] * 10


def test_lines_that_are_no_points_are_left_out(tmp_path: Path) -> None:
    """A file in an output folder may have anything in it."""
    path = tmp_path / "metrics.jsonl"
    good = b'{"time": "t", "attempt": 1, "step": 2, "values": {"loss": 1, "x": "y", "z": true}}\n'
    bad = (b"", b"{}", b"[1]", b"\xff", b'{"time": "t", "attempt": 1, "step": true, "values": {}}', b"[" * 100_000)
    path.write_bytes(b"\n".join(bad) + b"\n" + good + b'{"time": "cut o')
    assert [dict(point.values) for point in read_points(path)] == [{"loss": 1.0}]
    (tmp_path / "link").symlink_to(path)
    assert read_points(tmp_path / "link") == read_points(tmp_path / "nothing") == []


def test_a_write_that_fails_loses_only_the_point(tmp_path: Path) -> None:
    """A folder that is gone must not end a training."""
    MetricHistory([tmp_path / "gone" / "metrics.jsonl"]).add(report(1))
    MetricHistory([]).add(report(1))


def test_a_reader_reads_only_what_is_new(tmp_path: Path) -> None:
    """A line that is being written waits for its end; a file that was thinned or replaced is read again."""
    path = tmp_path / "metrics.jsonl"
    reader = MetricReader(path)
    assert reader.read() == []
    lines = [point_of(report(step)).to_line() for step in range(1, 6)]
    path.write_bytes(lines[0] + lines[1][:10])
    assert [point.step for point in reader.read()] == [1]
    with path.open("ab") as stream:
        stream.write(lines[1][10:] + lines[2])
    assert [point.step for point in reader.read()] == [1, 2, 3]
    new = tmp_path / "new"
    new.write_bytes(lines[3] + b"no point\n" + lines[4])
    new.replace(path)
    assert [point.step for point in reader.read()] == [4, 5]
    assert [point.step for point in read_points(path, last_bytes=len(lines[4]))] == [5]


def test_more_points_than_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest are read, whatever the size of the file. Otherwise a page would wait for a minute."""
    monkeypatch.setattr(metric_history, "_MOST_READ", 8)
    monkeypatch.setattr(metric_history, "_MAX_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    lines = [point_of(report(step)).to_line() for step in range(1, 41)]
    path.write_bytes(b"".join(lines[:30]))
    reader = MetricReader(path)
    for last in (30, 35, 40):
        path.write_bytes(b"".join(lines[:last]))
        for found in (reader.read(), read_points(path)):
            assert len(found) <= 8
            assert [point.step for point in found] == list(range(last - len(found) + 1, last + 1))
            assert found


def test_later_steps_of_a_stranger_do_not_end_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of new points comes from the points in the file, in which steps may be far ahead."""
    monkeypatch.setattr(metric_history, "MOST_POINTS", 64)
    path = tmp_path / "metrics.jsonl"
    for first in (-(10**300), 1):
        path.write_bytes(
            b"".join(
                point_of(report(2)).to_line().replace(b'"step": 2', b'"step": %d' % step)
                for step in (first, *[10**300] * 40)
            )
        )
        history = MetricHistory([path])
        for step in range(3, 300):
            history.add(report(step))
        assert len([point for point in read_points(path) if 3 <= point.step < 300]) > 20
