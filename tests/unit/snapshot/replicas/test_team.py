"""A snapshot copied by several ranks: who copies when, and that none is whole in which anything is another rank's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.replicas import team_lead
from safepoint.snapshot.replicas.replicas import CannotHelpError
from safepoint.snapshot.replicas.team import Ending
from safepoint.snapshot.staging.stager import Placed, Stager, Work
from tests.support.teams import ALL_BYTES, TIMEOUT_S, Node

Make = Callable[[int], Node]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def node(num_helpers: int) -> Node:
            node = Node(num_helpers)
            stack.callback(node.close)
            return node

        yield node


@pytest.mark.parametrize("num_helpers", [1, 2, 3])
def test_the_first_is_rehearsed_and_later_ones_are_shared(make: Make, num_helpers: int) -> None:
    """Each has the bytes of its boundary; in a rehearsal the lead alone copies."""
    node = make(num_helpers)
    node.begin()
    assert node.lead.copied() == ALL_BYTES
    assert not any(helper.copied() for helper in node.helpers)
    assert node.wait() == [Ending(True)] * (num_helpers + 1)
    assert node.is_right()
    node.rehearsed()
    for _ in range(3):
        for rank in (node.lead, *node.helpers):
            rank.step()
        node.begin()
        assert node.lead.copied() < ALL_BYTES
        assert sum(rank.copied() for rank in (node.lead, *node.helpers)) == ALL_BYTES
        assert node.wait() == [Ending(True)] * (num_helpers + 1)
        assert node.is_right()


def test_a_helper_s_step_waits_for_its_copy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the lead's for nothing that others copy, nor is the snapshot whole before."""
    node = make(1)
    node.rehearsed()
    node.take()
    opened, copy = threading.Event(), Stager._copy

    def waiting(stager: Stager, work: Work, index: int) -> None:
        if work.windows:
            assert opened.wait(TIMEOUT_S)
        copy(stager, work, index)

    monkeypatch.setattr(Stager, "_copy", waiting)
    node.begin()
    stepping = threading.Thread(target=node.helpers[0].step)
    before = node.helpers[0].parameters[0][0].item()
    stepping.start()
    node.lead.step()
    assert not node.lead.endings
    assert node.helpers[0].parameters[0][0].item() == before
    opened.set()
    stepping.join()
    assert node.wait()[0] == Ending(True)
    assert node.is_right()
    assert node.helpers[0].parameters[0][0].item() != before


def test_nobody_reads_on_in_a_shared_file(make: Make) -> None:
    """How far the helpers have come is known when they have reported."""
    node = make(1)
    node.rehearsed()
    node.lead.marks.clear()
    node.take()
    assert node.lead.marks == [(1, 0)]
    assert not node.helpers[0].marks


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_ranks_that_differ_are_not_mixed(make: Make, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Found out in the rehearsal it costs nothing, later one snapshot; from then on the lead copies alone."""
    node = make(2)
    why = "rank 2 holds other parameters or optimizer states than the first rank, whose are saved"
    if when == "later":
        node.rehearsed()
        assert node.take() == Ending(True)
    with torch.no_grad():
        # Of the last one, because the last helper copies the end of the file.
        node.helpers[1].optimizer.state[node.helpers[1].parameters[1]]["momentum_buffer"][-1] += 1
    if when == "later":
        assert node.take() == Ending(False, why)
    else:
        node.rehearsed()
        assert node.is_right()
    for _ in range(3):
        assert node.take() == Ending(True)
        assert node.is_right()
        assert not any(helper.copied() for helper in node.helpers)
    assert (why in caplog.text) == (when == "from the beginning")


def test_two_of_one_size_are_not_taken_for_each_other(make: Make) -> None:
    """The same tensors in another order have other sums, although all of them together have the same."""
    node = make(1)
    parameters = node.helpers[0].parameters
    first, second = (node.helpers[0].optimizer.state[one]["momentum_buffer"] for one in parameters)
    for rank in (node.lead, node.helpers[0]):
        rank.optimizer.state[rank.parameters[0]]["momentum_buffer"].fill_(5.0)
    first.copy_(second)
    second.fill_(5.0)
    node.rehearsed()
    for _ in range(2):
        assert node.take() == Ending(True)
        assert not node.helpers[0].copied()


def test_what_a_helper_has_lost_is_no_part_of_a_snapshot(make: Make) -> None:
    """It refuses at the boundary, where all can still agree that there is none."""
    node = make(1)
    node.rehearsed()
    assert node.take() == Ending(True)
    node.helpers[0].optimizer.state.clear()
    with pytest.raises(CannotHelpError, match="it does not have parameter"):
        node.begin()
    node.lead.stager.wait()
    [ending] = node.lead.endings
    assert not ending.is_whole
    assert "rank 1: it does not have parameter" in ending.why
    node.lead.endings.clear()
    assert node.take() == Ending(True)
    assert node.is_right()


def test_a_change_outside_a_step_is_noticed_on_every_rank(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper's tensors have versions too."""
    node = make(1)
    node.rehearsed()
    node.take()
    opened, copy = threading.Event(), Stager._copy

    def waiting(stager: Stager, work: Work, index: int) -> None:
        assert opened.wait(TIMEOUT_S)
        copy(stager, work, index)

    monkeypatch.setattr(Stager, "_copy", waiting)
    node.begin()
    helper = node.helpers[0]
    with torch.no_grad():
        helper.optimizer.state[helper.parameters[1]]["momentum_buffer"].mul_(1)
    opened.set()
    ending, theirs = node.wait()
    assert ending == Ending(False, "rank 1: parameters were changed outside optimizer.step")
    assert not theirs.is_whole


def test_a_helper_that_is_gone_leaves_no_whole_snapshot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it has copied by then; nobody waits for it."""
    node = make(2)
    node.rehearsed()
    assert node.take() == Ending(True)
    opened, copy = threading.Event(), Stager._copy

    def waiting(stager: Stager, work: Work, index: int) -> None:
        if stager is node.helpers[0].stager and work.windows:
            assert opened.wait(TIMEOUT_S)
        copy(stager, work, index)

    monkeypatch.setattr(Stager, "_copy", waiting)
    node.begin()
    node.helpers[0].team._channel.close()  # type: ignore[attr-defined]
    node.lead.stager.wait()
    assert node.lead.endings == [Ending(False)]
    node.lead.endings.clear()
    opened.set()
    for helper in node.helpers:
        helper.stager.wait()
    assert node.take() == Ending(True), "alone"


def test_a_lead_that_is_gone_is_not_waited_for(make: Make) -> None:
    """The helper has its own files to save."""
    node = make(1)
    node.lead.team.close()
    node.helpers[0].stage(1, [])
    node.helpers[0].stager.wait()
    assert node.helpers[0].endings == [Ending(True)]


def test_a_rank_that_cannot_begin_lets_nobody_wait(make: Make) -> None:
    """The snapshot is lost on all ranks, and the next one is shared again."""
    node = make(1)
    node.rehearsed()
    for has_lead in (True, False):
        node.number += 1
        if has_lead:
            node.lead.stage(node.number, [Placed(image=node.lead.image(), block=node.block, offset=0)])
            node.helpers[0].team.settle(node.number)  # its memory was busy
            node.lead.stager.wait()
            assert node.lead.endings.pop() == Ending(False)
        else:
            node.lead.team.settle(node.number)
            node.helpers[0].stage(node.number, [])
            node.helpers[0].stager.wait()
            assert node.helpers[0].endings.pop() == Ending(True)
        assert node.take() == Ending(True)
        assert node.is_right()
        assert node.helpers[0].copied()


def test_without_a_guard_the_lead_copies_alone(make: Make) -> None:
    """Nobody knows when parameters change; a helper in that case refuses."""
    node = make(1)
    node.rehearsed()
    helper = node.helpers[0]
    assert helper.guard is not None
    helper.guard.close()
    helper.guard = None
    with pytest.raises(CannotHelpError, match="change outside of optimizers"):
        node.begin()
    node.lead.stager.wait()
    assert not node.lead.endings.pop().is_whole
    assert node.take() == Ending(True)
    assert node.is_right()


def windows_of(node: Node) -> set[tuple[int, int, int]]:
    return set(node.helpers[0].team._windows)  # type: ignore[attr-defined]


def test_pages_that_came_anew_are_mapped_anew(make: Make) -> None:
    """A device would go on writing to those that were given back."""
    node = make(1)
    node.rehearsed()
    node.take()
    before = windows_of(node)
    assert len(before) == 1
    size = node.lead.image().size_bytes
    node.block.fit(size // 2)
    node.block.fit(size)
    node.begin()
    assert not node.helpers[0].copied(), "rehearsed again"
    node.wait()
    node.rehearsed()
    assert node.take() == Ending(True)
    assert node.helpers[0].copied()
    assert node.is_right()
    assert len(windows_of(node)) == 1
    assert windows_of(node).isdisjoint(before)
    node.block.fit(size - 1)
    node.block.fit(size)
    assert node.take() == Ending(True)
    assert node.helpers[0].copied(), "the last page was not given back"


def mapped(name: int) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:safepoint-{name} ")


def test_memory_that_the_lead_gives_back_is_nobody_s(make: Make) -> None:
    """Neither mapped nor open in a helper from the next snapshot on."""
    node = make(1)
    image, name = node.lead.image(), 4711
    node.block = Block.allocate(name, image.size_bytes)
    node.rehearsed()
    node.take()
    assert mapped(name) == 2
    node.block = Block.allocate(2, image.size_bytes)
    node.lead.work = None
    node.take()
    assert mapped(name) == 0
    assert len(windows_of(node)) == 1
    assert len(node.helpers[0].team._descriptors) == 1  # type: ignore[attr-defined]


def test_tensors_that_move_each_time_end_the_sharing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals cost sums, and nothing would ever come of them."""
    monkeypatch.setattr(team_lead, "_MOST_REHEARSALS", 3)
    node = make(1)
    sums: list[int] = []
    for _ in range(6):
        for rank in (node.lead, *node.helpers):
            state = rank.optimizer.state[rank.parameters[0]]
            state["momentum_buffer"] = state["momentum_buffer"].clone()
        node.rehearsed() if len(sums) < 3 else node.take()
        assert node.lead.work is not None
        sums.append(len(node.lead.work.summed))
        assert node.is_right()
        assert len(windows_of(node)) <= 1
    assert all(sums[:3])
    assert not any(sums[3:])
