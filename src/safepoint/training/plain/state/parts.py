"""The parts of a loop's state, and how they are written and read."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from safepoint.errors import ConflictError, UsageError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.plain.state.adapters import AdapterState, bases_of
from safepoint.training.plain.state.sharded import sharded_parts
from safepoint.training.plain.state.state_shapes import first_difference, shapes_of
from safepoint.training.plain.state.unsavable import check_savable, check_whole
from safepoint.training.state.plain_values import load_plain

_SHARDS = "sharded"
_log = logging.getLogger("safepoint")


class Parts(Protocol):
    """Model, optimizer and everything else that a checkpoint of a loop contains."""

    @property
    def strategy(self) -> str:
        """See `TrainingLoop`."""
        ...

    @property
    def zero_stage(self) -> int | None:
        """See `Manifest.zero_stage`."""
        ...

    @property
    def written_fraction(self) -> float:
        """See `TrainingLoop`."""
        ...

    def modules(self) -> list[torch.nn.Module]:
        """All models."""
        ...

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """See `Manifest.base`. All ranks call it, once, before anything is written or loaded."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step, without wrappers."""
        ...

    def write(self, folder: Path) -> None:
        """Write this rank's files; the folder exists."""
        ...

    def write_final(self, folder: Path) -> None:
        """Write only the models; the folder exists."""
        ...

    def load(self, folder: Path) -> None:
        """Load files that any number of ranks has written.

        Raises:
            UsageError: the checkpoint has other parts.
            ConflictError: a part does not fit the script's.
        """
        ...


class NamedParts:
    """Parts that the script has named, each with `state_dict` and `load_state_dict`; each is one file.

    Args:
        parts: by name.
        place: this rank.

    Raises:
        UsageError: one of them cannot be saved here.
    """

    def __init__(self, parts: Mapping[str, Any], place: Place) -> None:
        check_savable(parts)
        self._parts = {name: unwrapped(part) for name, part in parts.items()}
        self._adapters: dict[str, AdapterState] = {}
        self._place = place
        self._sharded = sharded_parts(self._parts)
        self._warn_of_wrong_optimizer()
        if self._sharded is not None:
            for name, part in self._whole_parts().items():
                check_whole(name, part.state_dict())

    def _warn_of_wrong_optimizer(self) -> None:
        weights = set(map(id, parameters_of(self.modules())))
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer) and weights and self._place.is_first:
                stepped = {id(one) for group in part.param_groups for one in group["params"]}
                if not stepped & weights:
                    _log.warning(
                        "%s updates no weight of the models that this session saves; check that it is the right one",
                        name,
                    )

    @property
    def strategy(self) -> str:
        """See `TrainingLoop`."""
        if self._sharded is not None:
            return "fsdp"
        return "ddp" if self._place.world_size > 1 else "single"

    @property
    def zero_stage(self) -> int | None:
        """None: a session saves DeepSpeed's state only through an accelerator."""
        return None

    @property
    def written_fraction(self) -> float:
        """Each rank writes its shards; without shards the first rank writes everything."""
        if self._sharded is not None:
            return 1 / self._place.world_size
        return 1.0 if self._place.is_first else 0.0

    def modules(self) -> list[torch.nn.Module]:
        """All models among the parts."""
        return list(self._modules().values())

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """See `Parts`; None when no module has adapters."""
        found = bases_of(self._modules(), peers, is_split=self._sharded is not None)
        if found is None:
            return None
        base, left_out = found
        for name, keys in left_out.items():
            if self._sharded is not None and name in self._sharded.names:
                self._sharded.left_out = keys
            else:
                self._adapters[name] = AdapterState(self._parts[name], keys)
        return base

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers among the parts."""
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    def write(self, folder: Path) -> None:
        """Write sharded parts through DCP; the first rank writes all others."""
        if self._sharded is not None:
            self._sharded.save(folder / _SHARDS)
        self._write(folder, self._whole_parts())

    def write_final(self, folder: Path) -> None:
        """Write only the modules: sharded ones as in a checkpoint, adapters in PEFT's layout."""
        if self._sharded is not None:
            self._sharded.save(folder / _SHARDS)
        whole, modules = self._whole_parts(), self._modules()
        self._write(
            folder, {name: part for name, part in whole.items() if name in modules and name not in self._adapters}
        )
        if self._place.is_first:
            for name, adapters in self._adapters.items():
                adapters.module.save_pretrained(str(folder if len(modules) == 1 else folder / name))

    def _write(self, folder: Path, parts: Mapping[str, Any]) -> None:
        if self._place.is_first:
            for name, part in parts.items():
                state = part.state_dict()
                if self._sharded is not None:
                    check_whole(name, state)
                torch.save(state, folder / f"{name}.pt")

    def _whole_parts(self) -> dict[str, Any]:
        sharded = self._sharded.names if self._sharded is not None else []
        return {name: self._adapters.get(name, part) for name, part in self._parts.items() if name not in sharded}

    def load(self, folder: Path) -> None:
        """See `Parts`."""
        missing = [name for name in self._whole_parts() if not (folder / f"{name}.pt").exists()]
        if self._sharded is not None and not (folder / _SHARDS).exists():
            missing += self._sharded.names
        if missing:
            raise UsageError(
                f"{folder.name} has no {missing[0]}: it was written by a session with other parts",
                hint="call session() with the arguments of that run, or start from the beginning with --from-scratch",
            )
        if self._sharded is not None:
            self._sharded.load(folder / _SHARDS)
        for name, part in self._whole_parts().items():
            # Modules copy into their own tensors; optimizers and others may keep the tensors that they are given.
            is_module = isinstance(part, torch.nn.Module | AdapterState)
            state = load_plain(folder / f"{name}.pt", is_copied=is_module)
            difference = first_difference(shapes_of(state), shapes_of(part.state_dict())) if is_module else ""
            if isinstance(part, torch.optim.Optimizer):
                difference = _optimizer_difference(state, part.state_dict())
            if difference:
                raise ConflictError(
                    f"{name} of {folder.name} differs from this script's: {difference}; training was not started",
                    hint="make it as it was then, or start from the beginning with --from-scratch",
                )
            part.load_state_dict(state)


def _optimizer_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two optimizers' states differ; empty when they fit."""
    before, after = ([len(group["params"]) for group in state["param_groups"]] for state in (then, now))
    if before != after:
        return f"it has groups of {before} parameters there and of {after} here"
    for group, other in zip(then["param_groups"], now["param_groups"], strict=True):
        gone, new = sorted(group.keys() - other.keys()), sorted(other.keys() - group.keys())
        if gone and new:  # releases of torch add settings to an optimizer, and take none away
            return f"it has {gone[0]!r} there and {new[0]!r} here"
    return ""


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The parameters of several modules, trained or not."""
    return [parameter for module in modules for parameter in module.parameters()]


def unwrapped(part: Any) -> Any:
    """The module without DistributedDataParallel and torch.compile, so that parameters keep the model's names."""
    for wrapper in ("_orig_mod", "module", "_orig_mod"):
        if wrapper != "module" or isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = getattr(part, wrapper, part)
    return part
