"""Numbers that a loop has computed, read without waiting for whatever computes them.

A number on a device is there when the device has come so far; who asks for it waits. So a copy of it is asked for,
and looked at the next time.
"""

from collections.abc import Mapping
from typing import Any

import torch


class Numbers:
    """The newest figures of a loop, by name."""

    def __init__(self) -> None:
        self._offered: Mapping[str, Any] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._are_there: torch.cuda.Event | None = None

    def offer(self, numbers: Mapping[str, Any]) -> None:
        """These are the newest: numbers, or tensors of one; nothing is done with them until somebody reads."""
        self._offered = {
            name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in numbers.items()
        }

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Further ones; those of `offer` count more."""
        self._offered = {**numbers, **self._offered}

    def read(self, *, is_last: bool = False) -> dict[str, float]:
        """What is known by now; on a device, what was the newest when this was called before.

        Args:
            is_last: wait for the newest.
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
        return {**self._follow(on_device), **known}

    def _follow(self, on_device: dict[str, torch.Tensor]) -> dict[str, float]:
        if self._are_there is not None and not self._are_there.query():
            return {}
        known = {name: float(copy.item()) for name, copy in self._copies.items()}
        self._copies, self._are_there = {}, None
        for name, one in on_device.items():
            copy = torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=True)
            self._copies[name] = copy.copy_(one, non_blocking=True)
        if self._copies:
            self._are_there = torch.cuda.Event()
            self._are_there.record()
        return known
