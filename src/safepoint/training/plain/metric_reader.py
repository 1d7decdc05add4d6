"""Reads metrics of a loop without waiting for the device that computes them.

Reading a number from a device waits until the device has computed it. So a copy is started, and read at the next
call.
"""

from collections.abc import Mapping
from typing import Any

import torch


class MetricReader:
    """The newest metrics of a loop, by name."""

    def __init__(self) -> None:
        self._offered: Mapping[str, Any] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def offer(self, numbers: Mapping[str, Any]) -> None:
        """Replace the newest metrics: numbers, or tensors of one element. They are not read yet."""
        self._offered = {
            name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in numbers.items()
        }

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add metrics; those of `offer` with the same name take precedence."""
        self._offered = {**numbers, **self._offered}

    def read(self, *, is_last: bool = False) -> dict[str, float]:
        """The metrics that are known; for those on a device, the values at the previous call.

        Args:
            is_last: wait for the newest values.
        """
        known: dict[str, float] = {}
        on_device: dict[str, torch.Tensor] = {}
        for name, one in self._offered.items():
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
