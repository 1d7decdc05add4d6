"""Loads DeepSpeed's universal layout, and then corrects what DeepSpeed leaves out or sets wrongly.

In the universal layout, each whole weight has a file of its own, so any number of ranks can load the weights. From
this layout, DeepSpeed 0.19 loads no buffers and no frozen weights. Under stage 3, DeepSpeed gives every group of the
optimizer the settings of the first group. All weights then also share one step counter, which each group increments.
"""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import CheckpointError, ConflictError
from safepoint.foundation.units import plural
from safepoint.training.integrations.deepspeed.universal import OTHERS
from safepoint.training.state.data_only import load_data, named_folder, only_data
from safepoint.training.state.zero_gathering import gathered

_STEP = "step"


def check_engine(engine: Any, shapes: dict[str, tuple[int, ...]], *, num_groups: int) -> None:
    """Check that this rank's engine can load the weights; nothing is changed.

    Args:
        engine: a DeepSpeedEngine under ZeRO, about to load.
        shapes: the shapes of the checkpoint's trained weights, by name.
        num_groups: the number of groups of the checkpoint's optimizer.

    Raises:
        ConflictError: the engine cannot load the weights; the message gives the reason.
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
                hint="train the model of the checkpoint, or start from the beginning with --from-scratch",
            )
    groups_now = len(engine.optimizer.optimizer.param_groups)
    if groups_now != num_groups:
        raise ConflictError(
            f"the checkpoint's optimizer has {plural(num_groups, 'group')} of weights, this run's has {groups_now}",
            hint="use the optimizer of the run that wrote the checkpoint, or start from the beginning with "
            "--from-scratch",
        )
    # Only the optimizers of stages 1 and 2 have one of these attributes. It lists the weights of each group.
    for group in getattr(engine.optimizer, "bf16_groups", None) or getattr(engine.optimizer, "bit16_groups", ()):
        if all(weight._hp_mapping is None for weight in group):
            raise ConflictError(
                "a group of the optimizer has so few weights that one of the ranks has none of them. DeepSpeed "
                "cannot load such a group after the number of ranks or the stage has changed",
                hint="use fewer ranks, or the same number of ranks and the same stage as before",
            )


@contextlib.contextmanager
def with_checked_tag(engine: Any, folder: Path, name: str = "latest") -> Generator[None]:
    """While the block runs, the engine loads the folder whose name is in the file `name`.

    This function reads and checks the file. The engine does not read the file again, because its content could change
    after the check.

    Args:
        engine: a DeepSpeedEngine that loads `folder` without a tag.
        folder: the folder of the checkpoint.
        name: the file of the checkpoint that contains the name of the folder.

    Raises:
        CheckpointError: there is no such file, or it names a folder that is not in the checkpoint.
    """
    checked = named_folder(folder, name)
    if checked is None:
        raise CheckpointError(f"{folder} was not loaded: it has no file {name}, so it is not known what to load")
    original = engine.load_checkpoint

    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(load_dir, checked if tag is None else tag, *args, **kwargs)

    with temporarily(engine, load_checkpoint=load_checkpoint):
        yield


def load_universal(engine: Any, folder: Path, load: Callable[[], None]) -> None:
    """Load the universal layout; all ranks call this function.

    Args:
        engine: an engine that `check_engine` has accepted.
        folder: the folder with the layout, as `Universal` writes it.
        load: makes `engine` load `folder`, in the same way as it loads a checkpoint.
    """
    inner: torch.optim.Optimizer = engine.optimizer.optimizer
    steps = {id(weight): state.get(_STEP) for weight, state in inner.state.items()}
    devices = {key: step.device for key, step in steps.items() if isinstance(step, torch.Tensor)}
    # Pipelined loading is switched off. It would deadlock here: each rank would wait for a message that its neighbour
    # does not send when the universal layout is loaded.
    with (
        only_data(folder, inner),
        with_checked_tag(engine, folder, "latest_universal"),
        temporarily(engine._config, load_universal_checkpoint=True),
        temporarily(engine._config.zero_config, pipeline_loading_checkpoint=False),
    ):
        load()
    saved: dict[str, Any] = load_data(next(folder.glob("*/zero/optimizer_state.pt")))
    # DeepSpeed does not set these settings, so `only_data` has not checked them.
    with states_of(folder), checked_optimizers(folder, inner):
        for group, settings in zip(inner.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in settings.items() if name != "params"})
    for weight, state in inner.state.items():
        if isinstance(state.get(_STEP), torch.Tensor):
            state[_STEP] = state[_STEP].detach().clone().to(devices.get(id(weight), state[_STEP].device))
    _load_others(engine, folder / OTHERS)


def _load_others(engine: Any, folder: Path) -> None:
    """Load buffers and frozen weights; under stage 3 the first rank sends each frozen weight to all ranks."""
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            path = folder / f"{name}.pt"
            if path.is_file():
                buffer.copy_(load_data(path))
        for name, weight in engine.module.named_parameters():
            path = folder / f"{name}.pt"
            if weight.requires_grad or not path.is_file():
                continue
            with gathered(weight, is_changed=True) as is_mine:
                if is_mine:
                    weight.data.copy_(load_data(path))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not trained" if shape is None else f"of shape {shape}"
