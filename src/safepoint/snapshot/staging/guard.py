"""Finds the tensors that only an optimizer's step changes, and that may be copied during forward and backward.

Before any optimizer of the process steps, the copies of that optimizer's tensors are completed. Snapshots are taken
at a boundary: the point between two steps.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from safepoint.snapshot.images.image import Piece

_data_ptr: Any = torch.Tensor.data_ptr
_epochs = itertools.count(1)
_TORCH, _HOOKS = "torch.optim.", "_optimizer_step_pre_hooks"


class Owner(NamedTuple):
    """The optimizer that alone changes a storage.

    Args:
        number: the number of the optimizer among the optimizers of the guard.
        tensors: the optimizer's tensors in the storage; each may have a version counter of its own.
    """

    number: int
    tensors: list[torch.Tensor]

    def covers(self, piece: Piece) -> bool:
        """Whether these tensors contain all bytes of a piece; other code may change the rest of the storage."""
        place, end = piece.address, piece.address + piece.num_bytes
        for begin, length in sorted(
            {(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors if _is_dense(tensor)}
        ):
            if begin <= place:
                place = max(place, begin + length)
        return place >= end


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Guard:
    """Watches optimizers.

    Args:
        before_step: called before an optimizer changes its parameters, with its number in `optimizers`, or with None
            if it is not in `optimizers`.
        optimizers: the optimizers that will step.
    """

    def __init__(
        self, before_step: Callable[[int | None], None], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self.optimizers = list(optimizers)
        """The optimizers that are watched. The number of each is its index."""
        self._before_step = before_step
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(self.optimizers)}
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._objects: list[Any] = []
        self._ids: list[int] = []
        self.epoch = next(_epochs)
        """A number, unique in the process, that changes whenever the results of `owner_of` may have changed."""
        self._owners: dict[int, Owner | None] = {}
        self._answers: dict[tuple[int, int], Owner | None] = {}
        self._is_fresh = True
        self._handle = before_changes(self._hook)

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        self._before_step(self._numbers.get(id(optimizer)))

    def refresh(self, *, has_new_pieces: bool = True) -> None:
        """Find out again which tensors the optimizers own; call this method at a boundary, before `owner_of`.

        Args:
            has_new_pieces: whether `owner_of` will be called with new pieces. If not, and if the known tensors of the
                optimizers have the same addresses as before, this call does nothing.
        """
        addresses: list[int] = list(map(_data_ptr, self._tensors))
        are_there = addresses == self._addresses
        if are_there and not has_new_pieces and not self._is_fresh:
            return
        objects = [one for optimizer in self.optimizers for one in _objects_of(optimizer)]
        ids: list[int] = list(map(id, objects))
        if are_there and ids == self._ids and not self._is_fresh:
            return
        self._is_fresh = False
        self._objects, self._ids = objects, ids  # while an object is referenced, no new object gets its id
        self.epoch = next(_epochs)
        self._tensors.clear()
        self._addresses.clear()
        self._owners.clear()
        self._answers.clear()
        for number, optimizer in enumerate(self.optimizers):
            for one in _objects_of(optimizer):
                if isinstance(one, torch.Tensor):
                    self._add(getattr(one, "_local_tensor", one), number)  # for a DTensor, use this rank's part

    def _add(self, tensor: torch.Tensor, number: int) -> None:
        try:
            if tensor.layout is not torch.strided:
                return
            address, base = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a tensor without a storage: nothing that could be copied by its address
            return
        self._tensors.append(tensor)
        self._addresses.append(address)
        known = self._owners.setdefault(base, Owner(number, []))
        if known is not None and known.number == number:
            known.tensors.append(tensor)
        else:  # several optimizers change the storage
            self._owners[base] = None

    def owner_of(self, piece: Piece) -> "Owner | None":
        """The optimizer that alone changes the bytes of a piece; None when other code may change them."""
        key = piece.address, piece.num_bytes
        if key not in self._answers:
            owner = self._owners.get(piece.base)
            self._answers[key] = owner if owner is not None and owner.covers(piece) else None
        return self._answers[key]

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()


def _objects_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, and the values of its state."""
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters + [value for state in optimizer.state.values() for value in state.values()]


def before_changes(call: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call `call` with each optimizer of the process when it steps, before anything is changed.

    An optimizer that is given a closure runs forward and backward inside of its step. Optimizers of torch change
    nothing before the closure has returned, so `call` runs when the closure returns. For other optimizers, and for
    optimizers that have a pre-hook, `call` runs at the beginning of the step, because they may change something
    before the closure returns.

    Args:
        call: receives the optimizer. If it raises, the optimizer does not step.

    Returns:
        A handle, whose `remove()` ends the calls.
    """

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure") if "closure" in kwargs else next(iter(args[1:2]), None)
        is_plain = type(optimizer).step.__module__.startswith(_TORCH) and not vars(optimizer)[_HOOKS]
        if closure is None or not is_plain:
            call(optimizer)
            return None

        def with_call() -> Any:
            loss = closure()
            call(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": with_call}
        return (args[0], with_call, *args[2:]), kwargs

    return register_optimizer_step_pre_hook(hook)
