"""The named values of a training state: each is one file, `<name>.pt`, as `torch.save` writes it."""

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.module_state import ModuleState, OptimizerState
from safepoint.snapshot.images.torch_image import TorchImages, UncomposableError


class StateImages:
    """Composes an image for each name at each save, and remembers the layout of each value."""

    def __init__(self) -> None:
        self._images: dict[str, TorchImages] = {}
        self._states: dict[str, tuple[Any, ModuleState | OptimizerState]] = {}

    def compose(self, name: str, value: Any) -> Image:
        """The image of a value as it is now.

        Args:
            name: of the value.
            value: a module, an optimizer, any object with `state_dict`, or plain values and tensors.

        Raises:
            Exception: any error of pickling.
        """
        images = self._images.setdefault(name, TorchImages(f"{name}.pt"))
        state, is_sure = self._state_of(name, value)
        try:
            return images.compose(state, trusts=is_sure)
        except UncomposableError:
            content = io.BytesIO()
            torch.save(state, content)
            return Image.of_bytes(images.path, content.getvalue())

    def _state_of(self, name: str, value: Any) -> tuple[Any, bool]:
        """What is saved of a value, and whether it surely has the same tensors as the last time."""
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            known, state = self._states.get(name, (None, None))
            if state is None or known is not value:
                state = ModuleState(value) if isinstance(value, torch.nn.Module) else OptimizerState(value)
                self._states[name] = value, state
            return state.state_dict(), state.is_sure
        return (value.state_dict() if hasattr(value, "state_dict") else value), False

    def forget(self, paths: Iterable[str]) -> None:
        """Release the tensors of these files, which were made for one save alone."""
        for path in paths:
            self._images.pop(path.removesuffix(".pt"), None)


def load_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Load the files of a verified checkpoint into `state`.

    Args:
        folder: the checkpoint.
        state: name → an object with `load_state_dict`, or a dictionary, which is updated.

    Raises:
        KeyError: the checkpoint has no such value.
        TypeError: a value cannot be loaded into.
    """
    for key, value in state.items():
        path = folder / f"{key}.pt"
        if not path.exists():
            raise KeyError(f"{folder} has no {key}.pt")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(content)
        elif isinstance(value, dict):
            cast("dict[Any, Any]", value).update(content)
        else:
            raise TypeError(f"{key} cannot be loaded: {type(value).__name__} has no load_state_dict and is no dict")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors as large as those that saving `value` writes, and on the same devices."""
    if isinstance(value, torch.nn.Module):
        yield from {id(tensor): tensor for tensor in value.state_dict(keep_vars=True).values()}.values()
    elif isinstance(value, torch.optim.Optimizer):
        parameters: list[torch.Tensor] = [one for group in value.param_groups for one in group["params"]]
        for parameter in parameters:
            if parameter.requires_grad:
                yield from (parameter, parameter)  # two moments
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_of(item)
