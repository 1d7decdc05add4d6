"""A stranger in the place of a rank: gloo authenticates no one, so what ranks send each other is sealed."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from safepoint.training.collective.seal import Seal, SealError

dist: Any = torch.distributed


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_of_one_job_understand_each_other() -> None:
    """Every rank takes the key from the job's store."""
    first, second = Seal(), Seal()
    messages = [first.close({"step": 3}, 0), second.close("x", 1)]
    assert first.open_all(messages) == second.open_all(messages) == [{"step": 3}, "x"]


@pytest.mark.parametrize("kind", ["unsealed", "other key", "of another rank", "changed", "empty", "short"])
def test_nothing_of_a_stranger_is_unpickled(kind: str, tmp_path: Path) -> None:
    """A message that no rank has sealed is refused before it is read."""
    mark, seal = tmp_path / "mark", Seal()
    bomb, other = _Bomb(mark), Seal()
    other._key = b"another"
    message = {
        "unsealed": bytes(32) + pickle.dumps(bomb),
        "other key": other.close(bomb, 0),
        "of another rank": seal.close(bomb, 1),
        "changed": seal.close(bomb, 0)[:-1] + b"\0",
        "empty": b"",
        "short": b"x" * 31,
    }[kind]
    with pytest.raises(SealError):
        seal.open_all([message])
    assert not mark.exists()


def test_an_earlier_message_does_not_count_again() -> None:
    """A message that was recorded and is sent again is refused."""
    seal = Seal()
    message = seal.close("once", 0)
    assert seal.open_all([message]) == ["once"]
    with pytest.raises(SealError):
        seal.open_all([message])
