"""Which tensors only an optimizer's step changes: those may be copied beside the next forward and backward.

Before any optimizer of the process steps, whoever copies is asked to be done with what belongs to that optimizer.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_data_ptr: Any = torch.Tensor.data_ptr
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
        self._objects: list[Any] = []
        self._ids: list[int] = []
        self.epoch = 0
        """Another one, also than any other guard's, whenever the answers of `owner_of` may have changed."""
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}
        self._handle = register_optimizer_step_pre_hook(self._hook)

    def _hook(self, optimizer: Any, *_: Any) -> None:
        self._before_step(self._numbers.get(id(optimizer)))

    def refresh(self, *, has_new_pieces: bool = True) -> None:
        """Look again which tensors the optimizers own; call it at a boundary, before `owner_of`.

        Args:
            has_new_pieces: whether `owner_of` is going to be asked; otherwise it is enough that the tensors known as
                the optimizers' are where they were.
        """
        addresses: list[int] = list(map(_data_ptr, self._tensors))
        are_there = addresses == self._addresses
        if are_there and not has_new_pieces:
            return
        objects = [one for optimizer in self._optimizers for one in _objects_of(optimizer)]
        ids: list[int] = list(map(id, objects))
        if are_there and ids == self._ids:
            return
        self._objects, self._ids = objects, ids  # both, so that no other object can get the number of one of them
        self.epoch = next(_epochs)
        self._tensors.clear()
        self._addresses.clear()
        self._owners.clear()
        for number, optimizer in enumerate(self._optimizers):
            for one in _objects_of(optimizer):
                if isinstance(one, torch.Tensor):
                    self._add(one, number)

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


def _objects_of(optimizer: Any) -> list[Any]:
    """Parameters, and the values of the state."""
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters + [value for state in optimizer.state.values() for value in state.values()]


__all__ = ["Guard"]
