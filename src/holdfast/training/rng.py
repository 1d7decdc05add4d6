"""The states of the random number generators that a training draws from."""

import random
from typing import Any

import numpy as np
import torch


def capture_rng() -> dict[str, Any]:
    """The states of all random number generators, in the layout of the Trainer's `rng_state.pth`."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state_all()
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Put all random number generators where `capture_rng` found them."""
    random.setstate(_as_tuples(states["python"]))
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    cuda = states.get("cuda")
    if cuda is not None and torch.cuda.is_available():
        if isinstance(cuda, torch.Tensor):
            torch.cuda.random.set_rng_state(cuda)
        else:
            torch.cuda.random.set_rng_state_all(cuda)


def _as_tuples(state: Any) -> Any:
    return tuple(_as_tuples(item) for item in state) if isinstance(state, list | tuple) else state  # pyright: ignore


__all__ = ["capture_rng", "restore_rng"]
