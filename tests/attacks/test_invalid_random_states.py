"""States of random number generators that no generator accepts: the error names the checkpoint as its cause."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.state.rng import capture_host_rng, restore_generators, restore_rng

_NUMPY = np.random.get_state()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("python", (3, (1 << 70,) * 625, None)),
        ("python", (3, (-1,) * 625, None)),
        ("python", (3, (1.5,) * 625, None)),
        ("python", (3, (1,) * 624, None)),
        ("python", (3, (), None)),
        ("python", ()),
        ("python", 5),
        ("numpy", ("PCG64", *_NUMPY[1:])),
        ("numpy", (_NUMPY[0], np.zeros(3), 3, 0, 0.0)),
        ("numpy", (_NUMPY[0], "keys", 3, 0, 0.0)),
        ("numpy", (*_NUMPY[:3], "x", "y")),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": 5, "pos": 3}, "has_gauss": [], "gauss": {}}),
        ("numpy", {"bit_generator": 5, "state": {"pos": 3}}),
        ("cpu", torch.zeros(16, dtype=torch.uint8)),
        ("cpu", torch.zeros(5056)),
        ("cpu", torch.empty(5056, dtype=torch.uint8, device="meta")),
        ("cpu", "state"),
    ],
)
def test_the_states_of_a_rank(name: str, state: Any) -> None:
    before = capture_host_rng()
    try:
        with pytest.raises(CheckpointError, match="random number generator"):
            restore_rng({**before, name: state})
    finally:
        restore_rng(before)
    assert random.getstate() == before["python"]


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(16, dtype=torch.uint8),
        torch.zeros(5056),
        torch.zeros(5056, dtype=torch.uint8),
        torch.empty(5056, dtype=torch.uint8, device="meta"),
        torch.zeros(0, dtype=torch.uint8),
    ],
)
def test_the_states_of_a_data_loader(state: torch.Tensor) -> None:
    """Before, the error of torch named neither a file nor the checkpoint."""
    with pytest.raises(CheckpointError, match="random number generator"):
        restore_generators([torch.Generator()], [state])
