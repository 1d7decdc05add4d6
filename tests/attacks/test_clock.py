"""The wall clock of the machine is set back or forward by a day while a job runs, or between two starts."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.local.final_model import adopt_scripts_model, note_end
from safepoint.checkpoint.local.retention import Candidate, parse_policies, select_superseded
from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_duration
from safepoint.jobs.local.attempt import rank_reports
from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from safepoint.training.engine.save_clock import Losses, read_losses
from tests.support.checkpoints import commit, describe, prepared
from tests.support.job_values import job_spec

DAY_S = 86400
SHIFTS = pytest.mark.parametrize("shift_s", [-DAY_S, DAY_S])
Shift = Callable[[float], None]


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Shift:
    """Set the wall clock, by seconds from the true time."""
    real_wall_s, real_utc_now = clock.wall_s, clock.datetime

    def move(seconds: float) -> None:
        class Moved:
            @staticmethod
            def now(zone: object) -> object:
                return real_utc_now.fromtimestamp(real_wall_s() + seconds, clock.UTC)

            fromisoformat = real_utc_now.fromisoformat

        monkeypatch.setattr(clock, "wall_s", lambda: real_wall_s() + seconds)
        monkeypatch.setattr(clock, "datetime", Moved)

    return move


@SHIFTS
def test_the_newest_checkpoint_is_that_of_the_highest_step(shift_s: int, shift: Shift, tmp_path: Path) -> None:
    """For resume, retention and the choice of what to upload."""
    output = prepared(tmp_path / "out")
    for step in (1, 2):
        commit(output, step)
    shift(shift_s)
    commit(output, 3)
    for path in (output.root / "checkpoint-3").rglob("*"):
        os.utime(path, (clock.wall_s(), clock.wall_s()))
    assert output.steps() == [3, 2, 1]
    assert output.superseded(parse_policies("newest=2")) == [1]


@SHIFTS
def test_the_newest_ones_stay_whatever_their_age_seems_to_be(shift_s: int) -> None:
    """Age alone deletes nothing, and a checkpoint of tomorrow is young."""
    candidates = [Candidate(step=step, created_s=1e9 + step) for step in (1, 2)]
    candidates.append(Candidate(step=3, created_s=1e9 + 3 + shift_s))
    doomed = select_superseded(candidates, parse_policies("newest=2,younger=2h"), now_s=1e9 + 4)
    assert doomed == []
    doomed = select_superseded(candidates, parse_policies("newest=2,younger=2h"), now_s=1e9 + 4 + 2 * DAY_S)
    assert doomed == [1]


@SHIFTS
def test_a_job_is_reported_as_running_when_its_ranks_report(shift_s: int, shift: Shift, tmp_path: Path) -> None:
    """By a change of their report, and not by its time."""
    report = tmp_path / "progress.json"
    report.write_text("{}")
    earlier = rank_reports.newest_report(tmp_path)
    shift(shift_s)
    assert rank_reports.newest_report(tmp_path) == earlier
    report.with_name("new").write_text("{}")
    os.utime(report.with_name("new"), (clock.wall_s(), clock.wall_s()))
    report.with_name("new").replace(report)
    assert rank_reports.newest_report(tmp_path) != earlier


@pytest.mark.parametrize("place", [".", "final"])
@SHIFTS
def test_the_model_that_the_script_saves_after_the_training(place: str, shift_s: int, tmp_path: Path) -> None:
    """It counts, and the model of an earlier run does not, whatever their times are."""
    output = prepared(tmp_path / "out")
    folder = output.root / place
    folder.mkdir(exist_ok=True)
    model = folder / "model.safetensors"
    model.write_bytes(b"of an earlier run")
    os.utime(model, (clock.wall_s() + DAY_S, clock.wall_s() + DAY_S))
    assert not adopt_scripts_model(output, note_end(output, describe(9)))
    end = note_end(output, describe(9))
    model.write_bytes(b"of this run")
    os.utime(model, (clock.wall_s() + shift_s, clock.wall_s() + shift_s))
    assert adopt_scripts_model(output, end)
    assert (output.control / "final/model.safetensors").read_bytes() == b"of this run"


def test_losses_of_earlier_attempts(tmp_path: Path) -> None:
    """The time that one attempt seems to have gone back is not subtracted from that of the others."""
    times = ["10T00:00", "10T05:00", "10T06:00", "10T07:00", "09T07:30", "09T08:30", "09T09:00"]
    names = ["attempt_started", "saved", "attempt_started", "saved", "saved", "saved", "attempt_started"]
    events = [{"time": f"2026-01-{time}:00.000Z", "event": name} for time, name in zip(times, names, strict=True)]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert read_losses(tmp_path / "events.jsonl") == Losses(trained_s=7 * 3600, count=2)


def test_no_age_and_no_duration_is_negative() -> None:
    """In tables of jobs, attempts and checkpoints."""
    assert format_age(-DAY_S) == "0 s"
    assert format_duration(-DAY_S) == "0.00 s"


@SHIFTS
def test_the_history_keeps_the_order_of_attempts_and_events(
    shift_s: int, shift: Shift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the order in which they happened."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with History() as history:
        history.add(job_spec("a"), actor="me")
        history.become("a", JobState.RUNNING, actor="me", attempt=1)
        history.begin_attempt("a", 1, 1)
        shift(shift_s)
        history.end_attempt("a", 1, outcome="", exit_code=75)
        history.begin_attempt("a", 2, 1)
        history.become("a", JobState.COMPLETE, actor="me", attempt=2)
        assert [attempt.number for attempt in history.attempts("a")] == [1, 2]
        assert [event.name for event in history.events("a")] == ["submitted", "running", "complete"]
