"""The parts of a loop's state, and how they are written and read.

A part is an object of the loop that has a state, such as the model or the optimizer.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.scheduler_steps import most_scheduler_steps
from safepoint.checkpoint.pickles.loading import check_memory, states_of
from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.scaler_states import checked_scalers
from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers, tried_schedulers
from safepoint.errors import ConflictError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.plain.data.position import Position
from safepoint.training.plain.state.part_checks import (
    check_savable,
    check_whole,
    first_difference,
    optimizer_difference,
    shapes_of,
)
from safepoint.training.plain.state.sharded import sharded_parts
from safepoint.training.state.base_model import base_entries, base_of, has_adapters, without
from safepoint.training.state.plain_values import load_plain

_SHARDS = "sharded"
_log = logging.getLogger("safepoint")


class Parts(ABC):
    """Model, optimizer and everything else that a checkpoint of a loop contains.

    By default, every rank has the whole state, and the first rank writes it. Subclasses may set the attributes to
    other values.

    Args:
        place: the position of this rank among the ranks.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.strategy = "ddp" if place.world_size > 1 else "single"
        """How the ranks share the state: `single`, `ddp`, `fsdp` or `deepspeed`."""
        self.zero_stage: int | None = None
        """The stage of DeepSpeed's ZeRO; None without DeepSpeed."""
        self.written_fraction = 1.0 if place.is_first else 0.0
        """The fraction of the model and the optimizer that this rank writes, from 0 to 1."""

    @abstractmethod
    def modules(self) -> list[torch.nn.Module]:
        """All models."""

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, without wrappers."""

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """The value for `Manifest.base`, which identifies the base model of adapters.

        If None, models with adapters are saved whole. All ranks call this method once, before anything is written or
        loaded.
        """
        return None

    def contradiction_in(self, folder: Path, manifest: Manifest, position: Position) -> str:
        """How the state in a checkpoint contradicts the manifest of the checkpoint; empty if it does not.

        Only the first rank calls this method, before a checkpoint is chosen.

        Args:
            folder: a verified checkpoint.
            manifest: its manifest.
            position: the position of the first rank in its data.
        """
        return ""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write this rank's files; the folder exists."""

    @abstractmethod
    def write_final(self, folder: Path) -> None:
        """Write only the models, without the optimizers; the folder exists."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the files of a checkpoint. Any number of ranks may have written it.

        Raises:
            ConflictError: the checkpoint has other parts, or a part does not fit the script's part.
        """


class AdapterState:
    """Saves and loads a module with adapters, without the frozen weights of the base model.

    Args:
        module: a module with adapters.
        left_out: the names of the entries that belong to the base model; see `base_entries`.
    """

    def __init__(self, module: torch.nn.Module, left_out: Collection[str]) -> None:
        self.module: Any = module
        self._left_out = left_out

    def state_dict(self) -> dict[str, Any]:
        """The module's state without the base model."""
        return without(self.module.state_dict(), self._left_out)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned; the caller has compared the keys."""
        self.module.load_state_dict(state, strict=False)


class NamedParts(Parts):
    """Parts that the script has named, each with `state_dict` and `load_state_dict`.

    The first rank writes a file for each part that is not sharded. All ranks write the sharded parts, through DCP
    (torch.distributed.checkpoint).

    Args:
        parts: the parts, by name.
        place: the position of this rank among the ranks.

    Raises:
        UsageError: a session cannot save one of the parts.
    """

    def __init__(self, parts: Mapping[str, Any], place: Place) -> None:
        super().__init__(place)
        check_savable(parts)
        self._parts = {name: unwrapped(part) for name, part in parts.items()}
        self._modules = {name: part for name, part in self._parts.items() if isinstance(part, torch.nn.Module)}
        self._sharded = sharded_parts(self._parts)
        self._whole = dict(self._parts)
        """What the first rank writes: all parts that are not sharded, without the base models of adapters."""
        self._warn_of_wrong_optimizer()
        if self._sharded is not None:
            self.strategy, self.written_fraction = "fsdp", 1 / place.world_size
            for name in self._sharded.names:
                del self._whole[name]
            for name, part in self._whole.items():
                check_whole(name, part.state_dict())

    def _warn_of_wrong_optimizer(self) -> None:
        weights = set(map(id, parameters_of(self.modules())))
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer) and weights and self._place.is_first:
                stepped = {id(one) for group in part.param_groups for one in group["params"]}
                if not stepped & weights:
                    _log.warning(
                        "%s updates no weight of the models that this session saves; check that it has the "
                        "parameters of these models",
                        name,
                    )

    def modules(self) -> list[torch.nn.Module]:
        """All models among the parts."""
        return list(self._modules.values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers among the parts."""
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """See `Parts`; None when no module has adapters."""
        base, left_out = bases_of(self._modules, peers, is_split=self._sharded is not None)
        for name, keys in left_out.items():
            if self._sharded is not None and name in self._sharded.names:
                self._sharded.left_out = keys
            else:
                self._whole[name] = AdapterState(self._parts[name], keys)
        return base

    def write(self, folder: Path) -> None:
        """Write sharded parts through DCP; the first rank writes all other parts."""
        if self._sharded is not None:
            self._sharded.save(folder / _SHARDS)
        self._write_whole(folder, self._whole)

    def write_final(self, folder: Path) -> None:
        """Write only the modules: a sharded module through DCP, any other in its own file, or in PEFT's layout."""
        if self._sharded is not None:
            self._sharded.save_model(folder / _SHARDS)
        modules = {name: part for name, part in self._whole.items() if name in self._modules}
        adapters = {name: part for name, part in modules.items() if isinstance(part, AdapterState)}
        self._write_whole(folder, {name: part for name, part in modules.items() if name not in adapters})
        if self._place.is_first:
            for name, part in adapters.items():
                part.module.save_pretrained(str(folder if len(self._modules) == 1 else folder / name))

    def _write_whole(self, folder: Path, parts: Mapping[str, Any]) -> None:
        if self._place.is_first:
            for name, part in parts.items():
                state = part.state_dict()
                if self._sharded is not None:
                    check_whole(name, state)
                torch.save(state, folder / f"{name}.pt")

    def load(self, folder: Path) -> None:
        """See `Parts`."""
        missing = [name for name in self._whole if not (folder / f"{name}.pt").exists()]
        if self._sharded is not None and not (folder / _SHARDS).exists():
            missing += self._sharded.names
        if missing:
            raise ConflictError(
                f"{folder.name} has no {missing[0]}: it was written by a session with other parts; training was not "
                "started",
                hint="call session() with the arguments of the run that wrote the checkpoint, or start from "
                "the beginning with --from-scratch",
            )
        with tried_schedulers(folder, *self._parts.values()):
            if self._sharded is not None:
                self._sharded.load(folder / _SHARDS)
            self._load_whole(folder)

    def _load_whole(self, folder: Path) -> None:
        for name, part in self._whole.items():
            # A module copies the loaded tensors, or gets copies (`checked_modules`). So these tensors may be mapped
            # from the file. An optimizer or another part may keep its tensors, so its file is read into memory.
            is_module = isinstance(part, torch.nn.Module | AdapterState)
            path = folder / f"{name}.pt"
            state = load_plain(path, is_copied=is_module)
            with states_of(path):
                difference = first_difference(shapes_of(state), shapes_of(part.state_dict())) if is_module else ""
                if isinstance(part, torch.optim.Optimizer):
                    difference = optimizer_difference(state, part.state_dict())
            if difference:
                raise ConflictError(
                    f"{name} of {folder.name} differs from this script's: {difference}; training was not started",
                    hint=f"create {name} as in the run that wrote the checkpoint, or start from the beginning with "
                    "--from-scratch",
                )
            known = [part] if isinstance(part, torch.optim.Optimizer) else []
            if not known and not is_module:
                check_memory(path, state, part.state_dict)
            with (
                states_of(path),
                checked_optimizers(path, *known),
                checked_schedulers(path, part, most_steps=most_scheduler_steps(folder)),
                checked_scalers(path),
                checked_modules(path),
            ):
                part.load_state_dict(state)


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The parameters of several modules, trained or not."""
    return [parameter for module in modules for parameter in module.parameters()]


def unwrapped(part: Any) -> Any:
    """The part without DistributedDataParallel and torch.compile, so that parameters keep the model's names."""
    for wrapper in ("_orig_mod", "module", "_orig_mod"):
        if wrapper != "module" or isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = getattr(part, wrapper, part)
    return part


def bases_of(
    modules: Mapping[str, torch.nn.Module], peers: Peers, *, is_split: bool
) -> tuple[dict[str, str] | None, dict[str, set[str]]]:
    """The base models of the adapters among a session's modules; all ranks call this function.

    Args:
        modules: the modules, by name.
        peers: all ranks.
        is_split: whether one of the modules is sharded (`fully_shard`).

    Returns:
        The value for `Manifest.base`, and the entries that are not saved. The value is None if no module has
        adapters. The entries are listed by the name of the module.
    """
    adapted = {name: module for name, module in modules.items() if has_adapters(module)}
    found: tuple[dict[str, str] | None, dict[str, set[str]]] = None, {}
    if adapted and (peers.place.is_first or is_split):
        bases = [base_of(module, num_ranks=peers.place.world_size) for module in adapted.values()]
        if peers.place.is_first:
            left_out = {name: base_entries(module) for name, module in adapted.items()}
            found = _joined({name: base for name, base in zip(adapted, bases, strict=True) if base}), left_out
    return peers.from_first(found)


def _joined(bases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    if len(bases) == 1:
        return dict(*bases.values())
    digest = digest_bytes("".join(f"{name} {base['digest']}\n" for name, base in bases.items()).encode())
    names, revisions = ([base[field] for base in bases.values() if base[field]] for field in ("name", "revision"))
    return {
        "name": " and ".join(names),
        "revision": " and ".join(revisions),
        "digest": digest,
    }
