"""What Accelerate has prepared: for loops of one's own, and for the Trainer, which stands on it.

The loop gives the session its `Accelerator`; `save_state` and `load_state` decide what is saved and how.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.foundation.environment import Place


class AcceleratedParts:
    """See `plain.parts.Parts`.

    Args:
        accelerator: an `accelerate.Accelerator` that has prepared model and optimizer.
        place: this rank.

    Raises:
        UsageError: it has prepared no model.
    """

    def __init__(self, accelerator: Any, place: Place) -> None:
        if not accelerator._models:
            raise UsageError(
                "the accelerator has prepared no model yet",
                hint="call accelerator.prepare(model, optimizer, …) before session()",
            )
        self._accelerator = accelerator
        self._place = place

    @property
    def strategy(self) -> str:
        """How the ranks share the model."""
        kind = str(getattr(self._accelerator.distributed_type, "value", ""))
        if kind in {"FSDP", "DEEPSPEED"}:
            return kind.lower()
        return "ddp" if self._place.world_size > 1 else "single"

    @property
    def zero_stage(self) -> int | None:
        """Of DeepSpeed's ZeRO, if it is used."""
        return zero_stage_of(self._accelerator)

    @property
    def share(self) -> float:
        """By the way in which the ranks share the work."""
        if self.strategy == "deepspeed" or writes_shards(self._accelerator):
            return 1 / self._place.world_size
        return 1.0 if self._place.is_first else 0.0

    def modules(self) -> list[torch.nn.Module]:
        """All that were prepared."""
        return list(self._accelerator._models)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that were prepared."""
        return [innermost(one) for one in self._accelerator._optimizers]

    def write(self, folder: Path) -> None:
        """As `save_state` does."""
        with self._naming_nothing(), self._below_replication(), shards_in_place(self._accelerator):
            self._accelerator.save_state(str(folder))

    def write_final(self, folder: Path) -> None:
        """Each model as `save_model` writes it."""
        models = self._accelerator._models
        for number, model in enumerate(models):
            self._accelerator.save_model(model, str(folder if len(models) == 1 else folder / f"model_{number}"))

    def load(self, folder: Path) -> None:
        """As `load_state` does."""
        with self._naming_nothing(), self._below_replication():
            self._accelerator.load_state(str(folder))

    @contextlib.contextmanager
    def _naming_nothing(self) -> Generator[None]:
        """Holdfast names checkpoints; Accelerate would put them elsewhere."""
        configuration = self._accelerator.project_configuration
        before, iteration = configuration.automatic_checkpoint_naming, configuration.iteration
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            configuration.automatic_checkpoint_naming, configuration.iteration = before, iteration

    @contextlib.contextmanager
    def _below_replication(self) -> Generator[None]:
        """Names of weights are those of the models, whether there are replicas of them or not."""
        models: list[Any] = self._accelerator._models
        before = list(models)
        replicated = torch.nn.parallel.DistributedDataParallel
        models[:] = [getattr(one, "module", one) if isinstance(one, replicated) else one for one in before]
        try:
            yield
        finally:
            models[:] = before


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, below those that wrap it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_stage_of(accelerator: Any) -> int | None:
    """The stage of DeepSpeed's ZeRO, 0 where it is off; None without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else int(plugin.zero_stage)


def writes_shards(accelerator: Any) -> bool:
    """Whether FSDP's ranks write their shards; otherwise the first rank writes the whole."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and "SHARDED" in str(plugin.state_dict_type)


@contextlib.contextmanager
def shards_in_place(accelerator: Any) -> Generator[None]:
    """Shards are handed over where they are: whoever writes them brings them to the host, once."""
    config = getattr(getattr(accelerator.state, "fsdp_plugin", None), "state_dict_config", None)
    if not (writes_shards(accelerator) and getattr(config, "offload_to_cpu", False)):
        yield
        return
    assert config is not None
    config.offload_to_cpu = False
    try:
        yield
    finally:
        config.offload_to_cpu = True


__all__ = ["AcceleratedParts", "innermost", "shards_in_place", "writes_shards", "zero_stage_of"]
