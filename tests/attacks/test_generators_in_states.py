"""States of random number generators whose position lies outside of the state.

torch does not check it: the memory behind the state would become random numbers, such as the initial values of
weights, which the next checkpoint contains.
"""

import random
import struct
from pathlib import Path

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO
from safepoint.training.state.data_only import load_data, only_data
from safepoint.training.state.rng import capture_rng, restore_rng

_NUM_WORDS = 624


def _state(left: int, position: int) -> torch.Tensor:
    data = bytearray(torch.Generator().manual_seed(5).get_state().numpy().tobytes())
    struct.pack_into("<iiQ", data, 8, left, 1, position)
    return torch.frombuffer(data, dtype=torch.uint8).clone()


_OUTSIDE = [(624, 624), (624, 2), (2, 624), (624, (1 << 32) + 624), (624, (7 << 32) + 2)]


@pytest.mark.parametrize("size_bytes", [5048, 5056])
@pytest.mark.parametrize(("left", "position"), _OUTSIDE)
def test_a_position_outside(left: int, position: int, size_bytes: int, tmp_path: Path) -> None:
    torch.Generator().set_state(_state(left, position))  # torch accepts it
    state = _state(left, position)[:size_bytes]  # earlier releases accept a shorter state, too
    for content in ({"cpu": state}, [state.clone().reshape(2, -1)], {"rng": {"cpu": state}}):
        path = tmp_path / "rng_state.pth"
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="was not loaded"):
            load_data(path)
        with pytest.raises(CheckpointError, match="was not loaded"), only_data(tmp_path):
            torch.load(path)
        with pytest.raises(Exception, match="was not loaded"):
            DirectCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("count", [0, 1, 2, 623, 624, 625, 5000])
def test_a_state_of_torch(count: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    if count:
        torch.rand(count, generator=generator)
    torch.save([generator.get_state(), torch.zeros(5056, dtype=torch.uint8)], tmp_path / "a.pt")
    assert torch.equal(load_data(tmp_path / "a.pt")[0], generator.get_state())


@pytest.mark.parametrize("spare", ["x", 10**400, [1.0], True])
def test_the_spare_number_of_python(spare: object, tmp_path: Path) -> None:
    """The next call of `random.gauss` would return it, or add it to a number."""
    before = random.getstate()
    states = capture_rng()
    states["python"] = (*states["python"][:2], spare)
    with pytest.raises(CheckpointError, match="invalid states"):
        restore_rng(states)
    assert random.getstate() == before
    with pytest.raises(CheckpointError), only_data(tmp_path):
        random.setstate(states["python"])
    random.gauss(0, 1)
    for state in (random.getstate(), before):  # with a spare number, and without one
        restore_rng({**states, "python": state})
        assert random.getstate() == state
