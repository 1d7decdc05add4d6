"""The loop of `watch_job`, with pictures instead of a cell: when it ends, and what it shows meanwhile."""

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.model.records import JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.notebook import screens
from safepoint.notebook.screens import CellScreen, LineScreen, screen_here
from safepoint.notebook.views import JobDetails, JobView
from safepoint.notebook.watching import StoppedWatchingError, watch
from safepoint.progress.metric_history import point_of
from safepoint.sdk import TrainerClient
from tests.support.dashboards import Sample, write_sample

Shown = list[tuple[JobView, JobDetails, str]]


class Pictures:
    """A screen that keeps what it shows."""

    def __init__(self) -> None:
        self.shown: Shown = []

    def show(self, view: JobView, details: JobDetails, note: str) -> None:
        self.shown.append((view, details, note))


@pytest.fixture
def view(home: Path, client: TrainerClient) -> JobView:
    write_sample(home, Sample(name="tiny", state=JobState.RUNNING, step=40, steps=(30,), num_points=40))
    view = client.get_job("tiny").view
    assert view is not None
    return view


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of the loop, which take no time."""
    waits: list[float] = []
    monkeypatch.setattr(clock, "sleep", waits.append)
    return waits


def reads(*answers: Any) -> Callable[[], tuple[JobView, JobDetails]]:
    """A function that gives one answer after the other; an exception is raised."""
    given: Iterator[Any] = iter(answers)

    def read() -> tuple[JobView, JobDetails]:
        answer = next(given)
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, tuple) else (answer, JobDetails())

    return read


@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.FAILED, JobState.SUSPENDED])
def test_it_ends_when_the_job_has_stopped(view: JobView, wait: list[float], state: JobState) -> None:
    """The last picture is of the state in which it stopped. What has not changed is not shown again."""
    screen = Pictures()
    preempted = replace(view, state=JobState.PREEMPTED)
    watch(reads(view, replace(view, read_s=1.0), preempted, replace(view, state=state)), screen, interval_s=3.0)
    assert [shown.state for shown, _, _ in screen.shown] == [JobState.RUNNING, JobState.PREEMPTED, state]
    assert wait == [3.0, 3.0, 3.0]


def test_an_interrupt_leaves_the_job_alone(view: JobView, wait: list[float]) -> None:
    """The last picture says so. In Jupyter the exception is one line."""
    screen = Pictures()
    with pytest.raises(KeyboardInterrupt, match="stopped watching tiny; the job continues") as found:
        watch(reads(view, KeyboardInterrupt()), screen, interval_s=1.0)
    assert isinstance(found.value, StoppedWatchingError)
    assert found.value._render_traceback_() == ["stopped watching tiny; the job continues"]
    assert screen.shown[-1][2] == "You stopped watching. The job continues; this is how it was last seen."


def test_a_job_that_cannot_be_read_for_a_while(view: JobView, wait: list[float]) -> None:
    """The picture says why, and the reads go on. Only at first is it an error."""
    screen = Pictures()
    away = SafepointError("the server does not answer")
    watch(reads(view, away, away, view, replace(view, state=JobState.COMPLETE)), screen, interval_s=1.0)
    notes = [note for _, _, note in screen.shown]
    assert notes == ["", "The job cannot be read now: the server does not answer. Safepoint tries again.", "", ""]
    with pytest.raises(SafepointError, match="does not answer"):
        watch(reads(away), screen, interval_s=1.0)


def test_a_deleted_job(view: JobView, wait: list[float]) -> None:
    screen = Pictures()
    watch(reads(view, NotFoundError("no job")), screen, interval_s=1.0)
    assert screen.shown[-1][2] == "The job was deleted."


def test_curves_of_reports_that_were_seen(view: JobView, wait: list[float]) -> None:
    """A cluster keeps no metrics: each report is a point, once."""
    assert view.progress is not None
    later = replace(view, progress=replace(view.progress, step=50))
    screen = Pictures()
    watch(reads(view, view, later, replace(later, state=JobState.COMPLETE)), screen, interval_s=1.0)
    assert [[point.step for point in details.points] for _, details, _ in screen.shown] == [[40], [40, 50], [40, 50]]


def test_one_picture_in_a_cell(view: JobView) -> None:
    """The first is displayed, and the others replace it; each has a text beside its HTML."""
    calls: list[tuple[Any, Any]] = []
    screen = CellScreen(lambda picture, **options: calls.append((picture, options)))
    screen.show(view, JobDetails(), "")
    screen.show(view, JobDetails(), "a note")
    assert [options["update"] for _, options in calls] == [False, True]
    assert len({options["display_id"] for _, options in calls}) == 1
    assert calls[1][0].keys() == {"text/plain", "text/html"}
    assert "a note" in calls[1][0]["text/html"]
    assert calls[1][0]["text/plain"].endswith("\n  a note")


def test_lines_where_there_is_no_cell(view: JobView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the state, each event once, and a line for the progress every ten seconds."""
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now[0])
    lines: list[str] = []
    screen = LineScreen(lines.append)
    old = JobEvent(time="2026-01-31T09:30:00Z", name="saved", actor="keeper", cause="periodic", detail={"step": 30})
    screen.show(view, JobDetails(events=[old]), "")
    assert len(lines) == 1
    assert lines[0].startswith("tiny: Running\n  Trains: step 40")
    assert view.progress is not None
    further = replace(view, progress=replace(view.progress, step=50, loss=None))
    new = replace(old, time="2026-01-31T09:31:00Z", detail={"step": 50})
    screen.show(further, JobDetails(events=[old, new]), "")
    assert lines[1:] == ["  09:31:00 saved by keeper: periodic, step 50"]
    now[0] += 10.0
    screen.show(further, JobDetails(events=[old, new]), "it is away")
    screen.show(further, JobDetails(events=[old, new]), "it is away")
    assert lines[2:] == ["tiny: Running, step 50 of 2,000, step 30 is saved", "  it is away"]


def test_the_screen_is_that_of_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell only in a kernel: IPython in a terminal cannot replace what it has shown."""
    importlib.import_module("IPython.display")  # it stays when its package is replaced
    for shell, kind in (
        (None, LineScreen),
        (SimpleNamespace(), LineScreen),
        (SimpleNamespace(kernel=object()), CellScreen),
    ):
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(screens.sys.modules, "IPython", ipython)
        assert isinstance(screen_here(), kind)
    monkeypatch.delitem(screens.sys.modules, "IPython")
    assert isinstance(screen_here(), LineScreen)


def test_the_client_watches_a_job(home: Path, client: TrainerClient, wait: list[float]) -> None:
    """Until it has stopped; what is wrong with the arguments is an error before."""
    write_sample(home, Sample(name="tiny", state=JobState.RUNNING, step=40, num_points=40))

    def end(_: float) -> None:
        with History() as history:
            history.become("tiny", JobState.FAILED, actor="supervisor", message="out of memory", exit_code=1)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(clock, "sleep", end)
        client.watch_job("tiny")
    assert "tiny: Running\n  Trains: step 40" in printed.getvalue()
    assert "failed by supervisor" in printed.getvalue()
    assert printed.getvalue().endswith("tiny: Failed\n  Failed at step 40: out of memory.\n")
    for wrong in (0, -1, float("nan"), "2", True):
        with pytest.raises(ValueError, match="polling_interval"):
            client.watch_job("tiny", polling_interval=wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="there is no job 'none'"):
        client.watch_job("none")


def test_metrics_that_can_be_read_later(view: JobView, wait: list[float]) -> None:
    """The full history replaces the reports that were seen. If it cannot be read once, later reports follow it."""
    assert view.progress is not None
    later = replace(view, progress=replace(view.progress, step=50))
    points = [point_of(replace(view.progress, step=step)) for step in (10, 20, 30, 40)]
    history = JobDetails(points=points)
    screen = Pictures()
    ended = (replace(later, state=JobState.COMPLETE), JobDetails())
    watch(reads(view, (view, history), (later, history), ended), screen, interval_s=1.0)
    steps = [[point.step for point in details.points] for _, details, _ in screen.shown]
    assert steps == [[40], [10, 20, 30, 40], [10, 20, 30, 40], [10, 20, 30, 40, 50]]
