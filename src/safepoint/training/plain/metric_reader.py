"""Reads metrics of a loop without waiting for the device that computes them.

Reading a number from a device waits until the device has computed it. So one call starts a copy, and a later call
reads the copy.
"""

from collections.abc import Mapping
from typing import Any

import torch


class MetricReader:
    """Reads the metrics of one loop."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def read(self, metrics: Mapping[str, Any], *, is_last: bool = False) -> dict[str, float]:
        """The metrics that have one value, as floats.

        If `is_last` is false, a metric on a CUDA device has the value from an earlier call. The metric is left out
        until the copy of this value is complete. If `is_last` is false, a metric on another accelerator is always
        left out.

        Args:
            metrics: the metrics by name. Values of type int or float, and tensors of one element, are read. Complex
                tensors, and values of all other types, such as bool, are left out.
            is_last: whether to wait for the values of this call.
        """
        known: dict[str, float] = {}
        on_device: dict[str, torch.Tensor] = {}
        for name, one in metrics.items():
            if isinstance(one, torch.Tensor):
                if one.numel() != 1 or one.is_complex():
                    continue
                if one.device.type == "cpu" or is_last:
                    known[name] = float(one.item())
                elif one.device.type == "cuda":
                    on_device[name] = one
            elif isinstance(one, int | float) and not isinstance(one, bool):
                known[name] = float(one)
        return {**self._copy(on_device), **known}

    def _copy(self, on_device: dict[str, torch.Tensor]) -> dict[str, float]:
        if self._copied is not None and not self._copied.query():
            return {}
        known = {name: float(copy.item()) for name, copy in self._copies.items()}
        self._copies, self._copied = {}, None
        for name, one in on_device.items():
            copy = torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=True)
            self._copies[name] = copy.copy_(one, non_blocking=True)
        if self._copies:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return known


def without_graph(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without their autograd graphs, which would keep the activations of a step in memory."""
    return {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in metrics.items()}
