"""The training of `bench_snapshot.py`: a model of a given size, its AdamW state, its step."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

NUM_LAYERS = 14
MATMUL_SIZE = 256
BYTES_PER_PARAMETER = 12  # the parameter and two moments, fp32


class Model(torch.nn.Module):
    """57 parameters in the proportions of a small language model: 228 tensors with AdamW's state."""

    def __init__(self, state_mb: int) -> None:
        super().__init__()
        total = state_mb * 1_000_000 // BYTES_PER_PARAMETER
        # Layers take about two thirds, the embedding the rest.
        width = max(64, int((total * 0.66 / (12 * NUM_LAYERS)) ** 0.5) // 64 * 64)
        vocabulary = (total - 12 * NUM_LAYERS * width**2) // width
        self.embedding = torch.nn.Parameter(torch.randn(vocabulary, width))
        for layer in range(NUM_LAYERS):
            for name, rows in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
                self.register_parameter(f"layer{layer}_{name}", torch.nn.Parameter(torch.randn(rows * width, width)))

    def forward(self) -> torch.Tensor:
        """Never called; the Trainer requires it."""
        return self.embedding.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The duration of a step, and of its end: from before the guard to after `optimizer.step`."""

    whole_s: float
    update_s: float


class Training:
    """Steps on one thread: a number of matrix products, then a real, fused AdamW step.

    Gradients stay as they are. Work and not time is fixed, so that a step grows when a save takes its processor, its
    memory bandwidth or its interpreter lock.
    """

    def __init__(self, state_mb: int, num_matmuls: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = Model(state_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        self.optimizer.step()
        self._num_matmuls = num_matmuls
        self._left, self._right, self._product = (torch.randn(MATMUL_SIZE, MATMUL_SIZE) for _ in range(3))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state, including the optimizer's step counters."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def step(self, guard: Callable[[], AbstractContextManager[object]]) -> StepTime:
        """Do one step; `guard` is what the system under test needs around `optimizer.step`."""
        started_s = time.perf_counter()
        multiply(self._left, self._right, self._product, self._num_matmuls)
        computed_s = time.perf_counter()
        with guard():
            self.optimizer.step()
        ended_s = time.perf_counter()
        return StepTime(whole_s=ended_s - started_s, update_s=ended_s - computed_s)


def multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(left, right, out=product)


def matmuls_for(step_ms: float) -> int:
    """How many products take that long on one thread when nothing else runs."""
    torch.set_num_threads(1)
    left, right, product = (torch.randn(MATMUL_SIZE, MATMUL_SIZE) for _ in range(3))
    fastest_s = float("inf")
    for _ in range(10):
        started_s = time.perf_counter()
        multiply(left, right, product, 100)
        fastest_s = min(fastest_s, (time.perf_counter() - started_s) / 100)
    return max(1, round(step_ms / 1000 / fastest_s))
