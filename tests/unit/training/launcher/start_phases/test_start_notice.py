"""What a slow start prints, so that a person knows what it waits for."""

import logging
import threading
from pathlib import Path

import pytest

from safepoint.foundation.environment import Place
from safepoint.foundation.events.start_events import Phase
from safepoint.training.launcher.launch_plan import LaunchPlan
from safepoint.training.launcher.start_phases import start_notice
from safepoint.training.launcher.start_phases.start_notice import StartNotice, describe_start
from safepoint.training.launcher.start_phases.start_timeline import StartTimeline
from safepoint.training.outcome.rank_record import RankRecordWriter


class Start:
    """The start of two ranks in a test."""

    def __init__(self, folder: Path, nnodes: int = 1) -> None:
        script = folder / "train.py"
        script.write_text("import json\nimport numpy\nfrom transformers import Trainer\n")
        address = "host-0" if nnodes > 1 else None
        self.plan = LaunchPlan(
            program=(str(script),), nproc_per_node="2", nnodes=nnodes, node_rank=nnodes - 1, master_addr=address
        )
        self.timeline = StartTimeline(folder, 0, lambda _: None)
        self._folder = folder

    def bear(self) -> list[RankRecordWriter]:
        """Let the processes of the ranks exist."""
        self.timeline.ranks_born(0, 2)
        return [RankRecordWriter(str(self._folder), Place(rank=rank, world_size=2)) for rank in range(2)]

    @property
    def line(self) -> str:
        """What the notice says now."""
        return describe_start(self.plan, self.timeline)


def wait_for_threads() -> None:
    """Wait for the threads of all notices."""
    for thread in threading.enumerate():
        if thread.name == "safepoint-start-notice":
            thread.join(60)


def test_the_line_says_what_the_start_waits_for(tmp_path: Path) -> None:
    """First the imports, then the script; nothing as soon as all ranks have reached the training."""
    start = Start(tmp_path)
    assert start.line == "starting 2 ranks: importing torch, numpy, transformers"
    ranks = start.bear()
    ranks[0].passed(Phase.SCRIPT_BEGUN)
    assert start.line == "starting 2 ranks: importing torch, numpy, transformers"
    ranks[1].passed(Phase.SCRIPT_BEGUN)
    prepares = "the training begins when the script has"
    assert start.line == (
        f"2 ranks run train.py; {prepares} imported its packages (torch, numpy, transformers) and prepared its "
        "model and its data"
    )
    for rank in ranks:
        rank.passed(Phase.IMPORTS_DONE)
    assert start.line == f"2 ranks run train.py; {prepares} prepared its model and its data"
    for rank in ranks:
        rank.passed(Phase.TRAINER_REACHED)
    assert start.line == ""


def test_a_node_of_several_says_that_it_waits_for_the_others(tmp_path: Path) -> None:
    """Before the store connects the launchers, and again before the ranks are connected."""
    start = Start(tmp_path, nnodes=2)
    assert start.line == (
        "starting 2 ranks on node 1 of 2: importing torch, numpy, transformers, connecting to the other nodes "
        "through host-0"
    )
    start.timeline.passed(Phase.STORE_READY)
    assert start.line == "starting 2 ranks on node 1 of 2: importing torch, numpy, transformers"
    ranks = start.bear()
    for rank in ranks:
        rank.passed(Phase.SCRIPT_BEGUN)
        rank.passed(Phase.TRAINER_REACHED)
    assert start.line == "2 ranks on node 1 of 2 wait for the ranks of the other nodes"
    for rank in ranks:
        rank.passed(Phase.GROUP_FORMED)
    assert start.line == ""


def test_many_packages_are_cut(tmp_path: Path) -> None:
    """The line stays short."""
    script = tmp_path / "train.py"
    script.write_text("import numpy, transformers, accelerate, safetensors, datasets, pytest, safepoint\n")
    line = describe_start(LaunchPlan(program=(str(script),)), StartTimeline(tmp_path, 0, lambda _: None))
    assert line.startswith("starting 1 rank: importing torch, numpy, transformers, ")
    assert line.endswith(", …")
    assert "safepoint" not in line


@pytest.mark.parametrize(
    ("is_wanted", "is_training", "count"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_only_a_slow_start_prints_a_line(
    is_wanted: bool,
    is_training: bool,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is printed once, and not if the ranks train already or a stop was requested."""
    monkeypatch.setattr(start_notice, "_AFTER_S", 0.001)
    # Commands that other tests have called may have changed the handlers of Safepoint's own logger.
    monkeypatch.setattr(start_notice, "_log", logging.getLogger("test.start_notice"))
    start = Start(tmp_path)
    if is_training:
        for rank in start.bear():
            rank.passed(Phase.TRAINER_REACHED)
    with caplog.at_level(logging.INFO, logger="test.start_notice"):
        StartNotice(start.plan, start.timeline, is_wanted=lambda: is_wanted)
        wait_for_threads()
    assert len(caplog.messages) == count


def test_a_fast_start_prints_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that has ended before the time has nothing to say."""
    start = Start(tmp_path)
    with caplog.at_level(logging.INFO, logger="safepoint"):
        StartNotice(start.plan, start.timeline, is_wanted=lambda: True).end()
        wait_for_threads()
    assert caplog.messages == []
