"""DeepSpeed's own load of the universal layout, and what it leaves out.

Of this layout DeepSpeed 0.19 does not bring back buffers and weights that are not trained; under stage 3 it gives all
groups of the optimizer the settings of the first one, and one counter of steps together, which then counts once for
each of them. All of that is set right here, after its load.
"""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import ConflictError
from safepoint.foundation.units import plural
from safepoint.training.integrations.deepspeed.universal import OTHERS
from safepoint.training.state.zero_gathering import gathered

_STEP = "step"


def check_engine(engine: Any, shapes: dict[str, tuple[int, ...]], *, num_groups: int) -> None:
    """Whether this rank's engine can load the weights; nothing is changed.

    Args:
        engine: a DeepSpeedEngine under ZeRO, about to load.
        shapes: of the weights of the checkpoint that are trained, by name.
        num_groups: of the checkpoint's optimizer.

    Raises:
        ConflictError: it cannot, with the reason.
    """
    now = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()) > 0
    }
    for name in [*now, *shapes]:
        if now.get(name) != shapes.get(name):
            before, after = (_shape(one.get(name)) for one in (shapes, now))
            raise ConflictError(
                f"the checkpoint's {name} is {before}, and this run's is {after}",
                hint="train the model that the run began with, or begin anew with --from-scratch",
            )
    groups_now = len(engine.optimizer.optimizer.param_groups)
    if groups_now != num_groups:
        raise ConflictError(
            f"the checkpoint's optimizer has {plural(num_groups, 'group')} of weights, this run's has {groups_now}",
            hint="train with the optimizer that the run began with, or begin anew with --from-scratch",
        )
    for group in _split_groups(engine.optimizer):
        if all(weight._hp_mapping is None for weight in group):
            raise ConflictError(
                "a group of the optimizer has so few weights that there is nothing of it for one of the ranks, which "
                "DeepSpeed cannot load where ranks or stage have changed",
                hint="train on fewer ranks, or on as many as before",
            )


def load_universal(engine: Any, folder: Path, load: Callable[[], None]) -> None:
    """Load the universal layout; all ranks call it.

    Args:
        engine: see `check_engine`, which has found nothing.
        folder: with the layout, as `Universal` writes it.
        load: has `engine` load `folder` in the way in which it loads a checkpoint.
    """
    inner: torch.optim.Optimizer = engine.optimizer.optimizer
    devices = {id(weight): _device(state.get(_STEP)) for weight, state in inner.state.items()}
    with _asking_for_universal(engine):
        load()
    saved: dict[str, Any] = torch.load(
        next(folder.glob("*/zero/optimizer_state.pt")), map_location="cpu", weights_only=False
    )
    for group, before in zip(inner.param_groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in before.items() if name != "params"})
    for weight, state in inner.state.items():
        if isinstance(state.get(_STEP), torch.Tensor):
            state[_STEP] = state[_STEP].detach().clone().to(devices.get(id(weight)) or state[_STEP].device)
    _load_others(engine, folder / OTHERS)


def _split_groups(optimizer: Any) -> list[list[Any]]:
    """The optimizer's groups of weights, below stage 3."""
    return list(getattr(optimizer, "bf16_groups", None) or getattr(optimizer, "bit16_groups", None) or [])


def _load_others(engine: Any, folder: Path) -> None:
    """Buffers, and weights that are not trained; under stage 3 the first rank gives each of these to all."""
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            path = folder / f"{name}.pt"
            if path.is_file():
                buffer.copy_(_read(path))
        for name, weight in engine.module.named_parameters():
            path = folder / f"{name}.pt"
            if weight.requires_grad or not path.is_file():
                continue
            with gathered(weight, is_changed=True) as is_mine:
                if is_mine:
                    weight.data.copy_(_read(path))


@contextlib.contextmanager
def _asking_for_universal(engine: Any) -> Generator[None]:
    config: Any = engine._config
    zero: Any = config.zero_config
    # One rank after the other would load, each waiting for a word that its neighbour does not send in this case.
    before = config.load_universal_checkpoint, zero.pipeline_loading_checkpoint
    config.load_universal_checkpoint, zero.pipeline_loading_checkpoint = True, False
    try:
        yield
    finally:
        config.load_universal_checkpoint, zero.pipeline_loading_checkpoint = before


def _device(step: Any) -> torch.device | None:
    return step.device if isinstance(step, torch.Tensor) else None


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not trained" if shape is None else f"of shape {shape}"


def _read(path: Path) -> torch.Tensor:
    return torch.load(path, map_location="cpu", weights_only=True)
