"""What Accelerate has prepared: for loops of one's own, and for the Trainer, which stands on it.

The loop gives the session its `Accelerator`; `save_state` and `load_state` decide what is saved and how.
"""

import contextlib
from collections.abc import Generator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import ConflictError, UsageError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.plain.state.adapters import bases_of, without
from safepoint.training.plain.state.parts import unwrapped

_ALWAYS = "random_states_0.pkl"
"""What `save_state` writes whatever was prepared."""
_LEAST_FOR_FSDP = (1, 15)


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
        check_accelerator(accelerator)
        self._accelerator = accelerator
        self._place = place
        self._left_out: dict[int, set[str]] = {}

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

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """Of models with PEFT's adapters; None under FSDP and DeepSpeed, where all of a model is saved."""
        if self.strategy not in {"single", "ddp"}:
            return None
        models = {str(number): unwrapped(model) for number, model in enumerate(self._accelerator._models)}
        found = bases_of(models, peers, is_split=False)
        if found is None:
            return None
        base, left_out = found
        self._left_out = {int(number): keys for number, keys in left_out.items()}
        return base

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that were prepared."""
        return [innermost(one) for one in self._accelerator._optimizers]

    def write(self, folder: Path) -> None:
        """As `save_state` does."""
        place = shards_in_place(self._accelerator)
        with self._naming_nothing(), self._below_replication(), self._leaving_out_bases(), place:
            self._accelerator.save_state(str(folder))

    def write_final(self, folder: Path) -> None:
        """Each model as `save_model` writes it, adapters as PEFT reads them."""
        models = self._accelerator._models
        for number, model in enumerate(models):
            target = str(folder if len(models) == 1 else folder / f"model_{number}")
            if number not in self._left_out:
                self._accelerator.save_model(model, target)
            elif self._place.is_first:
                unwrapped(model).save_pretrained(target)

    def load(self, folder: Path) -> None:
        """As `load_state` does."""
        self._check_kind(folder)
        options: dict[str, Any] = {}
        if self._left_out:
            # Nobody has saved the base, so that Accelerate must not look for it; nothing else may be missing.
            for number, model in enumerate(self._accelerator._models):
                self._check_keys(folder, number, unwrapped(model))
            options = {"strict": False}
        try:
            with self._naming_nothing(), self._below_replication():
                self._accelerator.load_state(str(folder), **options)
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            difference = _first_difference(error)
            raise ConflictError(
                f"a model of {folder.name} is not this script's: {difference}; training was not started",
                hint="make it as it was then, or begin anew with --from-scratch",
            ) from error

    def _check_kind(self, folder: Path) -> None:
        if not (folder / _ALWAYS).exists():
            raise ConflictError(
                f"{folder.name} was not written with an accelerator: it has no {_ALWAYS}; training was not started",
                hint="give the session what it was given then, or begin anew with --from-scratch",
            )
        had_shards = (folder / "pytorch_model_fsdp_0").is_dir()
        if self.strategy == "fsdp" and had_shards != writes_shards(self._accelerator):
            before, after = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[:: 1 if had_shards else -1]
            raise ConflictError(
                f"{folder.name} was written under {before}, this run uses {after}, which reads other files; training "
                "was not started",
                hint=f"train under {before}, or begin anew with --from-scratch",
            )

    def _check_keys(self, folder: Path, number: int, model: torch.nn.Module) -> None:
        from safetensors import safe_open

        path = folder / ("model.safetensors" if number == 0 else f"model_{number}.safetensors")
        if not path.exists():  # a hook of the script's has saved it in its own way
            return
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            then: dict[str, tuple[int, ...]] = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        state = without(model.state_dict(keep_vars=True), self._left_out.get(number, ()))
        tied: dict[int, set[str]] = {}  # of several names of one tensor the file has one
        for key, tensor in state.items():
            tied.setdefault(id(tensor), set()).add(key)
        is_same = all(key in state and tuple(state[key].shape) == shape for key, shape in then.items())
        if not is_same or not all(names & then.keys() for names in tied.values()):
            raise ConflictError(
                f"the weights of {folder.name} are not those of this script's model; training was not started",
                hint="make model and adapters as they were then, or begin anew with --from-scratch",
            )

    @contextlib.contextmanager
    def _naming_nothing(self) -> Generator[None]:
        """Safepoint names checkpoints; Accelerate would put them elsewhere."""
        configuration = self._accelerator.project_configuration
        before, iteration = configuration.automatic_checkpoint_naming, configuration.iteration
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            configuration.automatic_checkpoint_naming, configuration.iteration = before, iteration

    @contextlib.contextmanager
    def _leaving_out_bases(self) -> Generator[None]:
        """By Accelerate's own hook, which may change what is going to be saved."""

        def leave_out(models: list[Any], weights: list[dict[str, Any]], _: str) -> None:
            if len(weights) == len(models):  # otherwise a hook of the script's has saved some in its own way
                for number, keys in self._left_out.items():
                    weights[number] = without(weights[number], keys)

        hook = self._accelerator.register_save_state_pre_hook(leave_out)
        try:
            yield
        finally:
            hook.remove()

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


def _first_difference(error: RuntimeError) -> str:
    """What torch says of the first entry that does not fit, below a line that names the module."""
    return str(error).splitlines()[1:2][0].strip().rstrip(".") if "\n" in str(error) else str(error)


def check_accelerator(accelerator: Any) -> None:
    """Refuse ways of sharing the model of which nobody could go on from a checkpoint.

    Raises:
        UsageError: with the reason.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise UsageError(
            "the script uses FSDP1, whose flat parameters PyTorch replaces by FSDP2; training was not started",
            hint='set "version": 2 in fsdp_config (fsdp_version: 2 in a configuration of Accelerate)',
        )
    if plugin is not None and _installed() < _LEAST_FOR_FSDP:
        raise UsageError(
            f"accelerate {metadata.version('accelerate')} does not load all that FSDP2 saves: below 1.13 no state of "
            "the optimizer, below 1.15 no adapters of FULL_STATE_DICT; training was not started",
            hint="pip install 'accelerate>=1.15'",
        )
    if plugin is not None and "LOCAL" in str(plugin.state_dict_type):
        raise UsageError(
            "the script uses LOCAL_STATE_DICT, whose files are the memory of one rank each; training was not started",
            hint="set state_dict_type to SHARDED_STATE_DICT, which writes as little, or to FULL_STATE_DICT",
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is None or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return
    for name, num_ranks in (("tensor", parallel.tp_size), ("context", parallel.cp_size)):
        if num_ranks > 1:
            raise UsageError(
                f"the script uses {name} parallelism on {num_ranks} ranks: a checkpoint takes each rank for one with "
                "data of its own, and would miss parts of the model; training was not started",
                hint="use FSDP2 or DeepSpeed's ZeRO-3 for a model that does not fit on one device",
            )


def _installed() -> tuple[int, ...]:
    """The first two numbers of Accelerate's version."""
    return tuple(int(part) for part in metadata.version("accelerate").split(".")[:2] if part.isdigit())


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
