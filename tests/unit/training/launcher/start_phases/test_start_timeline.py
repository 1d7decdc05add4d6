"""The phases of a start: what the launcher and the ranks have noted becomes one event."""

from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events.start_events import Phase, StartTimed
from safepoint.training.launcher.start_phases.start_timeline import StartTimeline
from safepoint.training.outcome.rank_record import RankRecordWriter


def _ranks(folder: Path, restart: int) -> list[RankRecordWriter]:
    return [RankRecordWriter(str(folder), Place(rank=rank, world_size=2, restart=restart)) for rank in range(2)]


def test_a_start_is_reported_once_when_all_ranks_have_stepped(tmp_path: Path) -> None:
    """Each phase has the time and the number of the rank that passed it last, in the order of their times."""
    events: list[StartTimed] = []
    timeline = StartTimeline(tmp_path, 0, events.append)
    timeline.passed(Phase.STORE_READY)
    timeline.ranks_born(0, 2)
    first, second = _ranks(tmp_path, 0)
    for rank in (second, first):
        rank.passed(Phase.SCRIPT_BEGUN)
        rank.passed(Phase.SCRIPT_BEGUN)  # a second training of the script is no second start
    first.stepped()
    timeline.look()
    assert events == []
    second.stepped()
    second.passed(Phase.GROUP_FORMED)  # a later training
    timeline.look()
    timeline.look()
    timeline.ends()
    (event,) = events
    assert (event.restart, event.num_ranks) == (0, 2)
    ends = [(one.phase, one.rank) for one in event.phases]
    assert ends == [("store ready", None), ("ranks born", None), ("script begun", 0), ("first step done", 1)]
    times = [one.at_s for one in event.phases]
    assert times == sorted(times)
    assert "first start of 2 ranks on node 0: store ready 0." in event.line


def test_a_restart_begins_at_the_notice(tmp_path: Path) -> None:
    """A start that did not come to its first step is reported as far as it came, before the next one begins."""
    events: list[StartTimed] = []
    timeline = StartTimeline(tmp_path, 1, events.append)
    timeline.ranks_born(0, 2)
    _ranks(tmp_path, 0)[1].passed(Phase.SCRIPT_BEGUN)
    timeline.failure_noticed(clock.monotonic_s())
    timeline.passed(Phase.SURVIVORS_ENDED)
    timeline.ranks_born(1, 2)
    for rank in _ranks(tmp_path, 1):
        rank.stepped()
    timeline.look()
    assert [one.phase for one in events[0].phases] == ["ranks born", "script begun"]
    phases = events[1].phases
    assert [one.phase for one in phases] == ["noticed", "survivors ended", "ranks born", "first step done"]
    assert phases[0].at_s == 0
    assert events[1].restart == 1


def test_nothing_is_reported_without_ranks(tmp_path: Path) -> None:
    """A launcher that ends before its ranks start has no start to report."""
    events: list[StartTimed] = []
    timeline = StartTimeline(tmp_path, 0, events.append)
    timeline.passed(Phase.STORE_READY)
    timeline.look()
    timeline.ends()
    assert events == []
