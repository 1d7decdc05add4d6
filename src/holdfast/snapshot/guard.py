"""Which tensors only an optimizer's step changes: those may be copied beside the next forward and backward.

Before any optimizer of the process steps, whoever copies is asked to be done with what belongs to that optimizer.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_epochs = itertools.count(1)


class Guard:
    """Watches optimizers.

    Args:
        before_step: called before an optimizer changes its parameters, with its number among `optimizers`, or None
            for an optimizer that was not named.
        optimizers: those that will step.
    """

    def __init__(
        self, before_step: Callable[[int | None], None], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = list(optimizers)
        self._before_step = before_step
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(self._optimizers)}
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._counts: list[int] = []
        self.epoch = 0
        """Another one, also than any other guard's, whenever the answers of `owner_of` may have changed."""
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}
        self._handle = register_optimizer_step_pre_hook(self._hook)

    def _hook(self, optimizer: Any, *_: Any) -> None:
        self._before_step(self._numbers.get(id(optimizer)))

    def refresh(self) -> None:
        """Look again which tensors the optimizers own; call it at a boundary, before `owner_of`."""
        counts = [len(value) for one in self._optimizers for value in (one.state, *one.state.values())]
        if counts == self._counts and [tensor.data_ptr() for tensor in self._tensors] == self._addresses:
            return
        self._counts = counts
        self.epoch = next(_epochs)
        self._tensors.clear()
        self._addresses.clear()
        self._owners.clear()
        for number, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._add(parameter, number)
            states: Any = optimizer.state
            for state in states.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        self._add(value, number)

    def _add(self, tensor: torch.Tensor, number: int) -> None:
        if tensor.layout is not torch.strided:
            return
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())
        self._owners.setdefault(tensor.untyped_storage().data_ptr(), (number, tensor))

    def owner_of(self, base: int) -> tuple[int, torch.Tensor] | None:
        """Which optimizer alone changes the storage at `base`, and a tensor in it; None when others may."""
        return self._owners.get(base)

    def close(self) -> None:
        """Watch no longer."""
        self._handle.remove()


__all__ = ["Guard"]
