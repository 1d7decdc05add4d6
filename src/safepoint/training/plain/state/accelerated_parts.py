"""The state of a loop whose objects an `accelerate.Accelerator` has prepared.

The Accelerator's `save_state` and `load_state` decide which files a checkpoint has.
"""

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import CheckpointError, ConflictError, UsageError
from safepoint.foundation.environment import Place
from safepoint.foundation.field_types import MOST_COUNT
from safepoint.training.collective.peers import Peers
from safepoint.training.compatibility.accelerate_releases import innermost
from safepoint.training.plain.state.parts import Parts, bases_of, unwrapped
from safepoint.training.state.base_model import without
from safepoint.training.state.data_only import only_data
from safepoint.training.state.strategy import (
    check_accelerator,
    check_fsdp_files,
    shards_in_place,
    writes_shards,
    zero_stage_of,
)

_RANDOM_STATES = "random_states_0.pkl"
"""`save_state` always writes this file."""


class AcceleratedParts(Parts):
    """What the Accelerator has prepared, and what the script has registered with it.

    Args:
        accelerator: an `accelerate.Accelerator` that has prepared model and optimizer.
        place: the position of this rank among the ranks.

    Raises:
        UsageError: the accelerator has prepared no model, or uses parallelism that is not supported.
    """

    def __init__(self, accelerator: Any, place: Place) -> None:
        if not accelerator._models:
            raise UsageError(
                "the accelerator has prepared no model yet",
                hint="call accelerator.prepare(model, optimizer, …) before session()",
            )
        check_accelerator(accelerator)
        super().__init__(place)
        self._accelerator = accelerator
        self._left_out: dict[int, set[str]] = {}
        kind = str(getattr(accelerator.distributed_type, "value", ""))
        if kind in {"FSDP", "DEEPSPEED"}:
            self.strategy = kind.lower()
        self.zero_stage = zero_stage_of(accelerator)
        if kind == "DEEPSPEED" or writes_shards(accelerator):
            self.written_fraction = 1 / place.world_size

    def modules(self) -> list[torch.nn.Module]:
        """All models that were prepared."""
        return list(self._accelerator._models)

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """See `Parts`. None if there are no adapters of PEFT. None for FSDP and DeepSpeed: they save whole models."""
        if self.strategy not in {"single", "ddp"}:
            return None
        models = {str(number): unwrapped(model) for number, model in enumerate(self._accelerator._models)}
        base, left_out = bases_of(models, peers, is_split=False)
        self._left_out = {int(number): keys for number, keys in left_out.items()}
        return base

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers that were prepared, without Accelerate's wrappers."""
        return [innermost(one) for one in self._accelerator._optimizers]

    def write(self, folder: Path) -> None:
        """Run `save_state`."""
        in_place = shards_in_place(self._accelerator)
        with self._without_naming(), self._without_replication(), self._without_bases(), in_place:
            self._accelerator.save_state(str(folder))

    def write_final(self, folder: Path) -> None:
        """Write each model as `save_model` does, and adapters in PEFT's layout."""
        models = self._accelerator._models
        for number, model in enumerate(models):
            target = str(folder if len(models) == 1 else folder / f"model_{number}")
            if number not in self._left_out:
                self._accelerator.save_model(model, target)
            elif self._place.is_first:
                unwrapped(model).save_pretrained(target)

    def load(self, folder: Path) -> None:
        """Run `load_state`; see `Parts`."""
        if not (folder / _RANDOM_STATES).exists():
            raise ConflictError(
                f"{folder.name} was not written by a run that uses Hugging Face Accelerate: it has no "
                f"{_RANDOM_STATES}; training was not started",
                hint="call session() without `accelerator=`, as in the run that wrote the checkpoint, or start from "
                "the beginning with --from-scratch",
            )
        if self.strategy == "fsdp":
            has_shards = (folder / "pytorch_model_fsdp_0").is_dir()
            check_fsdp_files(folder.name, has_shards=has_shards, reads_shards=writes_shards(self._accelerator))
        options: dict[str, Any] = {}
        if self._left_out:
            # The checkpoint does not contain the base model, so Accelerate must not require all weights. This loop
            # checks the weights that the checkpoint must have.
            for number, model in enumerate(self._accelerator._models):
                self._check_keys(folder, number, unwrapped(model))
            options = {"strict": False}
        parts = (*self.optimizers(), *self._accelerator._schedulers, *self._accelerator._models)
        with self._without_naming(), self._without_replication(), only_data(folder, *parts):
            before = self._accelerator.step
            self._accelerator.load_state(str(folder), **options)
            self._check_step(folder, before)

    def _check_step(self, folder: Path, before: int) -> None:
        """Refuse an invalid number of micro-batches. Accelerate loads any number, and the next micro-batch fails."""
        step: Any = self._accelerator.step
        if type(step) is not int or not 0 <= step <= MOST_COUNT:
            self._accelerator.step = before
            raise CheckpointError(f"{folder / _RANDOM_STATES} has an invalid number of micro-batches")

    def _check_keys(self, folder: Path, number: int, model: torch.nn.Module) -> None:
        from safetensors import safe_open

        path = folder / ("model.safetensors" if number == 0 else f"model_{number}.safetensors")
        if not path.exists():  # a hook of the script has saved the model itself
            return
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            saved: dict[str, tuple[int, ...]] = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        state = without(model.state_dict(keep_vars=True), self._left_out.get(number, ()))
        tied: dict[int, set[str]] = {}  # if a tensor has several names, the file has one of them
        for key, tensor in state.items():
            tied.setdefault(id(tensor), set()).add(key)
        is_same = all(key in state and tuple(state[key].shape) == shape for key, shape in saved.items())
        if not is_same or not all(names & saved.keys() for names in tied.values()):
            raise ConflictError(
                f"the weights of {folder.name} do not fit this script's model; training was not started",
                hint="create model and adapters as in the run that wrote the checkpoint, or start from the "
                "beginning with --from-scratch",
            )

    def _without_naming(self) -> contextlib.AbstractContextManager[None]:
        """Switch off Accelerate's naming of checkpoints, which would choose another folder."""
        configuration = self._accelerator.project_configuration
        return temporarily(configuration, automatic_checkpoint_naming=False, iteration=configuration.iteration)

    @contextlib.contextmanager
    def _without_bases(self) -> Generator[None]:
        """While the block runs, a hook of Accelerate leaves frozen base models out of the saved weights."""

        def leave_out(models: list[Any], weights: list[dict[str, Any]], _: str) -> None:
            if len(weights) == len(models):  # if not, a hook of the script has saved a model itself
                for number, keys in self._left_out.items():
                    weights[number] = without(weights[number], keys)

        hook = self._accelerator.register_save_state_pre_hook(leave_out)
        try:
            yield
        finally:
            hook.remove()

    def _without_replication(self) -> contextlib.AbstractContextManager[None]:
        """Hide DistributedDataParallel from Accelerate, so that weights are saved with their names in the model."""
        replicated = torch.nn.parallel.DistributedDataParallel
        models: list[Any] = [
            getattr(one, "module", one) if isinstance(one, replicated) else one for one in self._accelerator._models
        ]
        return temporarily(self._accelerator, _models=models)
