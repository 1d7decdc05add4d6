"""Random numbers of one rank, whose device has another number after every start."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.training.state.rng import capture_rng, devices_left_out, restore_rng


class Machine:
    """CUDA devices with a state each, of which one is this rank's; stands for `torch.cuda`."""

    def __init__(self, count: int, current: int) -> None:
        self.states = [torch.tensor([100 + device], dtype=torch.uint8) for device in range(count)]
        self.current = current
        self.random = SimpleNamespace(
            get_rng_state_all=lambda: [state.clone() for state in self.states],
            set_rng_state_all=self._set_all,
            set_rng_state=self.set_rng_state,
        )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.current].clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[self.current] = state.clone()

    def _set_all(self, states: list[torch.Tensor]) -> None:
        for device, state in enumerate(states):
            if device >= len(self.states):
                raise IndexError(device)
            self.states[device] = state.clone()


@pytest.mark.parametrize(
    ("then", "now"),
    [
        pytest.param((8, 5), (4, 1), id="8 devices on one node, then 2 nodes of 4"),
        pytest.param((4, 1), (8, 5), id="2 nodes of 4, then 8 on one"),
        pytest.param((1, 0), (1, 0), id="each rank sees its own alone"),
    ],
)
def test_a_rank_has_its_own_device(then: tuple[int, int], now: tuple[int, int], monkeypatch: Any) -> None:
    """Its device goes on where the rank's device was, whatever its number; those of other ranks are left alone."""
    before, after = Machine(*then), Machine(*now)
    before.set_rng_state(torch.tensor([7], dtype=torch.uint8))
    others = [state for device, state in enumerate(after.states) if device != after.current]
    monkeypatch.setattr(torch, "cuda", before)
    saved = capture_rng()
    monkeypatch.setattr(torch, "cuda", after)
    restore_rng(saved)
    assert after.states[after.current].tolist() == [7]
    assert [state for device, state in enumerate(after.states) if device != after.current] == others


def test_on_the_cpu() -> None:
    """All three go on where they were."""
    saved = capture_rng()

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    drawn = draw()
    assert draw() != drawn
    restore_rng(saved)
    assert draw() == drawn


def test_a_model_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are not the current one are named; none are on the CPU."""
    monkeypatch.setattr(torch, "cuda", Machine(3, 1))

    def on(name: str) -> Any:
        return SimpleNamespace(device=torch.device(name))

    assert devices_left_out([on("cuda:2"), on("cuda:1"), on("cuda:2"), on("cpu")]) == ["cuda:2"]
    assert devices_left_out([on("cpu")]) == []
