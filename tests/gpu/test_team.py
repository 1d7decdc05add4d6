"""Two ranks that copy from a device together; both are in this process, on one device."""

from collections.abc import Iterator

import pytest
import torch

from safepoint.snapshot.replicas.team import Ending
from safepoint.snapshot.replicas.team_helper import Helper
from safepoint.snapshot.staging.device_copy import _host_bytes, words_of
from safepoint.snapshot.staging.stager import Work
from tests.support.teams import ALL_BYTES, Node

LONG_CYCLES = 1_000_000_000  # half a second and more of a device's time


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(1, "cuda:0")
    yield node
    node.close()


def test_both_copy_into_pinned_memory_and_the_file_is_the_first_s(node: Node) -> None:
    """Each step is given to the device at once, and what is copied is the state before it."""
    node.rehearsed()
    assert node.is_right()
    helper = node.helpers[0].team
    assert isinstance(helper, Helper)
    [window] = helper._windows.values()
    assert _host_bytes(window, 0, 1).is_pinned()
    for _ in range(5):
        node.begin()
        assert node.helpers[0].copied() > 0
        for rank in (node.lead, *node.helpers):
            rank.step()
        assert node.wait() == [Ending(True), Ending(True)]
        assert node.is_right()
        assert sum(rank.copied() for rank in (node.lead, *node.helpers)) == ALL_BYTES


def test_replicas_that_differ_on_the_device_are_found_out(node: Node) -> None:
    """By one element."""
    node.rehearsed()
    assert node.take() == Ending(True)
    helper = node.helpers[0]
    with torch.no_grad():
        helper.optimizer.state[helper.parameters[1]]["momentum_buffer"][-1] += 1
    ending = node.take()
    assert not ending.is_whole
    assert "rank 1 holds other parameters" in ending.why
    assert node.take() == Ending(True)
    assert node.is_right()


def test_sums_are_the_host_s(node: Node) -> None:
    """And those of the boundary, whatever is given to the device after it."""
    pieces = node.lead.image().pieces[:4]
    expected = [int(words_of(piece.owner, piece.address, piece.num_bytes).cpu().sum()) for piece in pieces]
    torch.cuda._sleep(LONG_CYCLES)
    work = Work(placed=[], summed=pieces, on_begin=lambda: None, on_end=lambda _: None)
    node.lead.stager.stage(work, node.lead.guard)
    node.lead.step()
    node.lead.stager.wait()
    assert node.lead.stager.sums == expected
