"""What a launcher tells, and its last word."""

import http.client
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation.events.run_events import Failed, Finished, Restarted
from safepoint.foundation.events.stream import EventLog
from safepoint.progress.metrics_server import MetricsServer
from safepoint.progress.record import PROGRESS_NAME, Progress, State, read_progress
from safepoint.settings.run_settings import RunSettings
from safepoint.training.launcher.launcher_reporter import LauncherReporter
from safepoint.training.outcome.launcher_folder import deliver_pending_events, share_event_stream
from tests.support.ports import free_port
from tests.unit.progress.test_record import FULL


class Place:
    """A launcher's folder, a job's, and an output folder."""

    def __init__(self, folder: Path) -> None:
        self.records, self.job, self.output = (folder / name for name in ("records", "job", "out"))
        self.control = self.output / ".safepoint"
        for path in (self.records, self.job, self.control):
            path.mkdir(parents=True)
        self.stream = self.control / "events.jsonl"
        self.termination_log = folder / "termination-log"
        self.termination_log.touch()
        self.settings = RunSettings(job_dir=str(self.job), termination_log=str(self.termination_log))

    def reporter(self, node: int = 0, **changes: Any) -> LauncherReporter:
        return LauncherReporter(replace(self.settings, **changes), self.records, node=node, num_nodes=node + 1)

    def tell(self, **changes: Any) -> Progress:
        """As the first rank does."""
        progress = replace(FULL, output_dir=str(self.output), **changes)
        for folder in (self.records, self.job, self.control):
            (folder / PROGRESS_NAME).write_bytes(progress.to_bytes())
        return progress

    def everywhere(self) -> Progress:
        """What stands in the output folder and in the job's, which is the same."""
        mine, theirs = (read_progress(folder / PROGRESS_NAME) for folder in (self.control, self.job))
        assert mine is not None
        assert mine == theirs
        return mine


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_who_started_the_job_is_the_first_event_of_both_streams(place: Place) -> None:
    """In the output folder's when a rank has found that, in its place among those of the rank."""
    reporter = place.reporter()
    reporter.start()
    [started] = lines(place.job / "events.jsonl")
    assert (started["event"], started["actor"], started["pid"]) == ("started", "launcher", os.getpid())
    assert started["user"]
    assert started["host"]
    deliver_pending_events(place.records, place.stream)
    EventLog(place.stream, actor="rank 0").write(Finished(step=1))
    deliver_pending_events(place.records, place.stream)
    assert [line["event"] for line in lines(place.stream)] == ["started", "finished"]
    assert lines(place.stream)[0] == started


def test_signals_failures_and_restarts_are_reported(place: Place) -> None:
    """Straight into both streams once the output folder is known; meanwhile the training is starting again."""
    place.tell(state=State.TRAINING)
    share_event_stream(str(place.records), place.stream)
    reporter = place.reporter()
    reporter.signal_received(signal.SIGUSR1)
    reporter.report(Failed(rank=1, exit_code=-9, reason="rank 1 was killed by SIGKILL"))
    reporter.restarting(Restarted(restart=2, max_restarts=3, reason="rank 1 was killed by SIGKILL"))
    reported = lines(place.stream)
    assert reported == lines(place.job / "events.jsonl")
    assert [(line["event"], line["actor"], line["cause"]) for line in reported] == [
        ("signal_received", "launcher", "SIGUSR1"),
        ("failed", "launcher", "rank 1 was killed by SIGKILL"),
        ("restarted", "launcher", "rank 1 was killed by SIGKILL"),
    ]
    progress = place.everywhere()
    assert (progress.state, progress.restart, progress.step) == (State.STARTING, 2, FULL.step)


@pytest.mark.parametrize(
    ("code", "state", "percentage", "events"),
    [
        (0, State.FINISHED, 24, []),
        (75, State.INTERRUPTED, 24, ["interrupted"]),
        (143, State.INTERRUPTED, 24, ["interrupted"]),
        (1, State.FAILED, 24, ["failed"]),
        (137, State.FAILED, 24, ["failed"]),
    ],
)
def test_the_last_word_is_the_launchers_where_ranks_had_none(
    code: int, state: State, percentage: int, events: list[str], place: Place
) -> None:
    """A rank that was killed has left what it said last; job, output folder and platform learn how it has ended."""
    place.tell(state=State.TRAINING)
    share_event_stream(str(place.records), place.stream)
    reporter = place.reporter()
    reporter.end(code, "why", limit_s=1, rank=3, error="ValueError: x")
    reporter.end(1, "later", limit_s=1)
    progress = place.everywhere()
    assert (progress.state, progress.step, progress.message) == (state, 120, "ValueError: x")
    assert json.loads(place.termination_log.read_text())["progressPercentage"] == percentage
    assert [line["event"] for line in lines(place.stream)] == events
    if events == ["failed"]:
        [failed] = lines(place.stream)
        assert (failed["rank"], failed["exit_code"], failed["cause"], failed["error"]) == (
            3,
            code,
            "why",
            "ValueError: x",
        )


def test_what_a_rank_has_said_of_its_end_stands(place: Place) -> None:
    """Its message and its time; it is not said twice."""
    reported = place.tell(state=State.INTERRUPTED, message="state of step 120 is saved")
    share_event_stream(str(place.records), place.stream)
    place.reporter().end(75, "", limit_s=1, is_reported=True)
    assert place.everywhere() == reported
    assert lines(place.stream) == []


def test_a_job_that_never_trained_has_no_last_word_to_the_platform(place: Place) -> None:
    """Its progress is unknown."""
    place.reporter().end(143, "", limit_s=1)
    assert place.termination_log.read_text() == ""
    assert [line["event"] for line in lines(place.job / "events.jsonl")] == ["interrupted"]


def test_other_nodes_only_tell_what_is_theirs(place: Place) -> None:
    """The first node speaks for the job."""
    reported = place.tell(state=State.TRAINING)
    share_event_stream(str(place.records), place.stream)
    reporter = place.reporter(node=1)
    reporter.start()
    reporter.end(1, "why", limit_s=1, rank=3)
    assert place.everywhere() == reported
    assert place.termination_log.read_text() == ""
    assert {line["actor"] for line in lines(place.stream)} == {"launcher of node 1"}


def get(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_progress_is_served_while_the_job_lives(place: Place) -> None:
    """As the first rank tells it; the port is free again behind it."""
    port = free_port()
    reporter = place.reporter(metrics_port=port)
    reporter.start()
    assert "error" in get(port)
    for state, percentage in ((State.TRAINING, 24), (State.FINISHED, 24)):
        place.tell(state=state)
        assert get(port)["progressPercentage"] == percentage
    reporter.end(0, "", limit_s=1)
    with pytest.raises(ConnectionRefusedError):
        get(port)


def test_a_port_that_is_taken_is_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on without being served."""
    port = free_port()
    other = MetricsServer(lambda: None, host="127.0.0.1", port=port)
    reporter = place.reporter(metrics_port=port)
    reporter.start()
    reporter.end(0, "", limit_s=1)
    other.close()
    assert f"port {port} cannot be used" in caplog.text
    assert "--metrics-port" in caplog.text
