"""Parts, outcomes and offers that the keepers of several nodes leave for each other."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import FileDigest, digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.snapshot.keeper.persist.snapshot_commit import Nodes

FILE = FileEntry.of("state.bin", FileDigest(size_bytes=5, digest=digest_bytes(b"state")))


def nodes(folder: Path, count: int = 3) -> list[Nodes]:
    return [Nodes(folder, index=index, count=count) for index in range(count)]


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def test_the_first_node_receives_what_the_others_wrote(tmp_path: Path) -> None:
    """Their files with digests, in the order of the nodes."""
    first, second, third = nodes(tmp_path)
    third.publish(7, RankPart(rank=2))
    second.publish(7, RankPart(rank=1, files=(FILE,)))
    assert first.collect(7, never) == [RankPart(rank=1, files=(FILE,)), RankPart(rank=2)]


def test_a_node_alone_waits_for_no_other(tmp_path: Path) -> None:
    """And writes no file."""
    [alone] = nodes(tmp_path, 1)
    assert alone.collect(7, never) == []
    assert not list(tmp_path.iterdir())


def test_an_error_ends_the_waiting(tmp_path: Path) -> None:
    """The part of the third node is not awaited any more."""
    first, second, _ = nodes(tmp_path)
    second.publish(7, RankPart(rank=1, error="the disk is full"))
    failed, missing = first.collect(7, never)
    assert failed.error == "the disk is full"
    assert missing == RankPart(rank=2, error="node 2 has not sent its file list in time")


def test_parts_of_another_save_do_not_count(tmp_path: Path) -> None:
    """A step may be saved several times in an attempt."""
    first, second, third = nodes(tmp_path)
    second.publish(6, RankPart(rank=1))
    third.publish(6, RankPart(rank=2))
    assert all(part.error for part in first.collect(7, at_once))


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_other_nodes_receive_the_outcome(tmp_path: Path, is_committed: bool) -> None:
    """That the save is committed, or why not."""
    first, second, _ = nodes(tmp_path)
    second.publish(7, RankPart(rank=1))
    assert second.outcome(7, at_once) == "node 0 has not committed the checkpoint in time"
    if is_committed:
        first.announce(7)
    else:
        first.publish(7, RankPart(rank=0, error="the disk is full"))
    assert second.outcome(7, never) == ("" if is_committed else "the disk is full")


def test_the_newest_step_that_all_nodes_have(tmp_path: Path) -> None:
    """Each node calls the others by its offer."""
    first, second, third = nodes(tmp_path)
    assert not first.is_called()
    first.offer([3, 4, 5])
    assert not first.is_called()
    assert second.is_called()
    second.offer([3, 4])
    assert first.newest_of_all(at_once) is None
    third.offer([2, 4, 5])
    assert first.newest_of_all(never) == 4


def test_no_step_that_all_nodes_have(tmp_path: Path) -> None:
    """The ranks of a node had taken no snapshot when they failed."""
    first, second = nodes(tmp_path, 2)
    first.offer([3])
    second.offer([])
    assert second.newest_of_all(never) is None
