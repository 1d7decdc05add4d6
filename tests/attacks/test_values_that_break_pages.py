"""A training reports numbers whose sums and products are infinite; on a cluster, any person who may change a job can.
Another one writes to a folder whose name is not UTF-8.

The list of jobs shows all other jobs meanwhile, and documents are JSON, which has no infinite numbers.
"""

import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from safepoint.answers.consequence import Action, consequence_of
from safepoint.cli.commands import watch
from safepoint.cli.job_answers import row
from safepoint.dashboard.rendering import json_response
from safepoint.jobs.local.history import History
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.presentation import drawings
from safepoint.progress.record import PROGRESS_NAME, Progress, SaveStatistics, State
from tests.support.dashboards import Sample, write_sample
from tests.unit.dashboard.conftest import Dashboard, home, start

__all__ = ["home", "start"]

_PAGES = (
    "/jobs",
    "/storage",
    "/costs",
    *(f"/jobs/local/slow{action}" for action in ("", "/suspend", "/scale", "/delete")),
)
_REPORTS: dict[str, dict[str, Any]] = {
    "time left": {"step_s": 1e308, "max_steps": 1 << 62},
    "pauses": {"step_s": 1e308, "pause_s": 1e308, "max_steps": 1000},
    "save": {"step_s": 1.7e308, "saves": {"expected_s": 1.7e308}},
    "pace": {"step_s": 5e-324, "samples_per_step": (1 << 63) - 1},
    "full in no time": {"space": [{"path": "/", "free_bytes": 1 << 40, "remaining_s": 5e-324}]},
    "repeated": {"step_s": 1.7e308, "repeated_steps": 1 << 62},
    "unsaved": {"step_s": 1e308, "safe_step": 1, "step": 1 << 62},
}


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(text, parse_constant=refuse)
    return True


@pytest.mark.parametrize("name", _REPORTS)
def test_a_job_that_reports_them(name: str, home: Path, start: Callable[..., Dashboard]) -> None:
    """It is listed beside the other job, and has pages and documents."""
    for job in ("slow", "other"):
        write_sample(home, Sample(name=job, state=JobState.RUNNING, step=40, steps=(10, 20), num_points=4))
    path = job_folder("slow") / PROGRESS_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | _REPORTS[name]))
    dashboard = start()
    dashboard.visitor()
    for page in _PAGES:
        assert dashboard.get(page).status_code == 200, page
        assert _is_json(dashboard.get(f"{page}.json").text)
    assert "other" in dashboard.get("/jobs").text


def _report(home: Path, name: str, **values: Any) -> None:
    path = job_folder(name) / PROGRESS_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", _REPORTS)
def test_the_commands_that_show_all_jobs(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` and `watch` show the other job, too."""
    for job in ("slow", "other"):
        write_sample(home, Sample(name=job, state=JobState.RUNNING, step=40, steps=(10, 20), num_points=4))
    _report(home, "slow", **_REPORTS[name])
    with LocalJobs() as jobs:
        found = [jobs.job(job) for job in ("slow", "other")]
        rows = [row(job, jobs.progress_of(job)) for job in found]
        watch._Changes()(jobs, found)
    assert [cells[0] for cells in rows] == ["slow", "other"]
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["slow", "other"]


def test_losses_whose_difference_is_infinite(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`watch` shows both jobs, and draws the curve."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((200, 40)))
    for job in ("slow", "other"):
        write_sample(home, Sample(name=job, state=JobState.RUNNING, step=40, steps=(10, 20), num_points=4))
    screen = watch._Screen()
    with LocalJobs() as jobs:
        found = [jobs.job(job) for job in ("slow", "other")]
        for loss in (-1.7e308, 1.7e308):
            _report(home, "slow", loss=loss)
            screen(jobs, found)
    shown = capsys.readouterr().out
    assert "other" in shown
    assert "▁█" in shown


@pytest.mark.parametrize(
    "values",
    [[-1.7e308, 1.7e308], [-1.7e308, 0.0, 1.7e308], [5e-324, 0.0], [1.7e308] * 3, [(1 << 62) * 1.0, -1.7e308]],
)
def test_curves_of_large_numbers(values: Sequence[float]) -> None:
    """A terminal and a page use the same heights."""
    assert len(watch.sparkline(values)) == len(values)
    assert len(drawings.sparkline(values).split()) == len(values)
    assert "nan" not in drawings.sparkline(values)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_curves_of_numbers_that_are_not_finite(value: float) -> None:
    assert watch.sparkline([1.0, value]) == drawings.sparkline([1.0, value]) == ""


def test_what_a_suspension_would_mean(home: Path) -> None:
    """With the report of a cluster, which is made of metrics with any values."""
    write_sample(home, Sample(name="slow", state=JobState.RUNNING, step=40, steps=(10,)))
    progress = Progress(
        time="2026-01-01T00:00:00Z", state=State.TRAINING, step=1 << 62, max_steps=1 << 63, step_s=1.7e308,
        saves=SaveStatistics(expected_s=1.7e308),
    )  # fmt: skip
    with History() as history:
        found = consequence_of(Action.SUSPEND, history.job("slow"), progress)
    assert (found.save_needed_s, found.lost_s, progress.remaining_s) == (None, None, None)
    assert "not known" in found.sentences[1]


def test_a_path_that_is_not_utf_8(home: Path, start: Callable[..., Dashboard]) -> None:
    """The pages with all jobs and all folders are shown, and link to it."""
    folder = home / "bytes \udcff\udcfe"
    folder.mkdir()
    for job, root in (("odd", folder), ("other", home)):
        write_sample(root, Sample(name=job, state=JobState.RUNNING, step=40, steps=(10, 20), num_points=4))
    dashboard = start()
    dashboard.visitor()
    of_job = (f"/jobs/local/odd{page}" for page in ("", "/checkpoints", "/delete"))
    for page in ("/jobs", "/storage", "/costs", *of_job):
        answer = dashboard.get(page)
        assert answer.status_code == 200, page
        assert _is_json(dashboard.get(f"{page}.json").text)
    assert "/checkpoints?location=" in (storage := dashboard.get("/storage").text)
    assert "bytes%20%FF%FE" in storage
    assert dashboard.get("/checkpoints?location=%FF").status_code == 400


def test_documents_without_infinite_numbers() -> None:
    """They are null. The words in texts stay."""
    document = {"a": float("inf"), "b": [float("-inf"), float("nan"), "NaN"], "c": "Infinity", "d": 1.5}
    answer = asyncio.run(json_response(document))
    assert json.loads(bytes(answer.body)) == {
        "version": 1, "a": None, "b": [None, None, "NaN"], "c": "Infinity", "d": 1.5,
    }  # fmt: skip
    assert _is_json(bytes(answer.body).decode())


@pytest.mark.parametrize("steps", [-5, 0, 7])
def test_usual_numbers(steps: int) -> None:
    """They are what they were."""
    progress = Progress(time="", state=State.TRAINING, step_s=2.0, pause_s=0.5)
    assert progress.time_of(steps) == max(0, steps) * 2.5
    assert Progress(time="", state=State.TRAINING).time_of(steps) is None
