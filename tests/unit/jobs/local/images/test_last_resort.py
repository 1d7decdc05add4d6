"""When a run is frozen at its deadline, and how much time is reserved for it; with a stand-in for CRIU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.errors import FreezeError
from safepoint.foundation.environment import Place
from safepoint.jobs.local.images import last_resort
from safepoint.jobs.local.images.last_resort import LastResort, needed_s
from safepoint.settings.run_settings import RunSettings
from safepoint.training.outcome.launcher_folder import note_stop_signal, reserved_s, was_frozen
from safepoint.training.outcome.rank_record import RankRecordWriter
from safepoint.transparent import freeze
from safepoint.transparent.criu import program
from safepoint.transparent.criu.program import Criu


class Clock:
    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(last_resort.clock, "monotonic_s", lambda: clock.now_s)
    return clock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a launcher, which is this process."""
    folder = tmp_path / "launcher"
    folder.mkdir()
    monkeypatch.setattr(last_resort, "running_launchers", lambda: [(folder, os.getpid())])
    monkeypatch.setattr(last_resort, "resident_bytes", lambda _: 400_000_000)
    monkeypatch.setattr(program, "find_criu", lambda: Criu(path="criu", version="4.2.1"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    note_stop_signal(folder, 15)
    return folder


def resort(tmp_path: Path, grace_s: float = 60.0) -> LastResort:
    return LastResort(RunSettings(grace_s=grace_s), [os.getpid()], tmp_path / "images")


def test_time_is_reserved_for_the_size_of_the_processes(folder: Path, tmp_path: Path, clock: Clock) -> None:
    """Again as they grow, but only every few seconds."""
    watched = resort(tmp_path)
    watched.look()
    assert reserved_s(folder) == needed_s(400_000_000) + 0.5
    (folder / "reserved").unlink()
    watched.look()
    assert reserved_s(folder) == 0.0
    clock.now_s += 5.0
    watched.look()
    assert reserved_s(folder) > 0


def test_a_launcher_that_has_just_started_is_looked_at_soon(
    folder: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no folder yet. A request to stop may come in its first second."""
    watched = resort(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(last_resort, "running_launchers", list)
        watched.look()
    clock.now_s += 0.2
    watched.look()
    assert reserved_s(folder) > 0


def test_at_most_half_of_the_time_is_reserved(
    folder: Path, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning says how long the grace period should be; with that, there is none."""
    watched = resort(tmp_path, grace_s=5.0)
    for _ in range(3):
        watched.look()
        clock.now_s += 10.0
    assert reserved_s(folder) == 2.0
    [warning] = caplog.records
    assert "set --grace to" in warning.getMessage()
    caplog.clear()
    resort(tmp_path, grace_s=2.5 * (needed_s(400_000_000) + 0.5)).look()
    assert not caplog.records


def test_it_is_due_when_the_reserved_time_begins(folder: Path, tmp_path: Path, clock: Clock) -> None:
    """Not without a request to stop, without ranks, when a rank ends by itself, or a second time."""
    watched = resort(tmp_path)
    watched.look()
    asked_s = clock.now_s
    clock.now_s = asked_s + 57.0 - needed_s(400_000_000) - 0.1
    record = RankRecordWriter(str(folder), Place())
    assert not watched.is_due(asked_s)
    clock.now_s += 0.2
    assert watched.is_due(asked_s)
    assert not watched.is_due(None)
    record.ended(75, "saved")
    assert not watched.is_due(asked_s)
    RankRecordWriter(str(folder), Place(restart=1))
    assert watched.is_due(asked_s)
    for path in folder.glob("start-*"):
        path.unlink()
    assert not watched.is_due(asked_s)


def test_what_cannot_be_frozen_is_not_marked(
    folder: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is there while the processes are frozen, and not after a failure. There is no second attempt."""
    marks: list[bool] = []

    def fail(*_: object, **__: object) -> None:
        marks.append(was_frozen(folder))
        raise FreezeError("a process uses io_uring")

    monkeypatch.setattr(freeze, "freeze_trees", fail)
    watched = resort(tmp_path)
    RankRecordWriter(str(folder), Place())
    with pytest.raises(FreezeError):
        watched.freeze(before_end=lambda _: None)
    assert marks == [True]
    assert not was_frozen(folder)
    assert not watched.is_due(clock.now_s - 1000)
