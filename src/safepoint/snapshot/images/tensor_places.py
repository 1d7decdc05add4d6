"""Whether tensors have the same addresses, types, shapes and strides as before: what can change in place.

Checking hundreds of tensors one by one takes most of the time at a boundary. So where torch has it, one call compares
the types, shapes and strides of all; it is the guard of compiled functions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

_data_ptr: Any = torch.Tensor.data_ptr


class TensorPlaces:
    """Remembers the places of tensors.

    Args:
        values: tensors; other values are ignored.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._addresses: list[int] = []
        try:
            self._addresses = self._addresses_now()
            self._have_same_layout = _guard_of_torch(self._tensors) or _guard_of_lists(self._tensors)
            # An empty view has no address, so a change of its storage cannot be seen.
            empty = [tensor for tensor, address in zip(self._tensors, self._addresses, strict=True) if not address]
            self._can_compare = not any(tensor.untyped_storage().nbytes() for tensor in empty)
        except RuntimeError:  # sparse, or a wrapper around others
            self._can_compare = False

    def _addresses_now(self) -> list[int]:
        return list(map(_data_ptr, self._tensors))

    def hold(self) -> bool:
        """Whether nothing has changed but what the tensors contain."""
        return self._can_compare and self._addresses_now() == self._addresses and self._have_same_layout()


def _guard_of_torch(tensors: list[torch.Tensor]) -> Callable[[], bool] | None:
    try:
        from torch._C._dynamo.guards import TensorGuards  # pyright: ignore

        make_guards: Any = TensorGuards
        guards = make_guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        if not guards.check(*tensors):
            return None
    except Exception:  # noqa: BLE001  it is not part of torch's interface, and may be gone or know other arguments
        return None
    return lambda: guards.check(*tensors)


def _guard_of_lists(tensors: list[torch.Tensor]) -> Callable[[], bool]:
    def now() -> list[Any]:
        return [(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]

    before = now()
    return lambda: now() == before
