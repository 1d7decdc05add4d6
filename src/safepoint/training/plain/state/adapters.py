"""The state of a model with PEFT's adapters, without the frozen weights of its base."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from safepoint.checkpoint.format.digest import Digester
from safepoint.training.collective.peers import Peers
from safepoint.training.state.base_model import base_of, has_adapters, left_to_base, plain_key


class AdapterState:
    """Stands for a module where states are written and read, and leaves its base out.

    Args:
        module: with adapters.
        left_out: see `left_to_base`.
    """

    def __init__(self, module: torch.nn.Module, left_out: Collection[str]) -> None:
        self.module: Any = module
        self._left_out = left_out

    def state_dict(self) -> dict[str, Any]:
        """The module's state without the base."""
        return without(self.module.state_dict(), self._left_out)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned; the caller has compared the keys."""
        self.module.load_state_dict(state, strict=False)


def without(state: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """The entries of a module's state that are not among `left_out`; see `left_to_base`."""
    return {key: value for key, value in state.items() if plain_key(key) not in left_out}


def bases_of(
    modules: Mapping[str, torch.nn.Module], peers: Peers, *, is_split: bool
) -> tuple[dict[str, str] | None, dict[str, set[str]]]:
    """The bases of the adapters among a session's modules; all ranks call it.

    Args:
        modules: by name.
        peers: all ranks.
        is_split: whether `fully_shard` has split one of them.

    Returns:
        For `Manifest.base`, None when no module has adapters; and by the name of each module with adapters the
        entries that are not saved.
    """
    adapted = {name: module for name, module in modules.items() if has_adapters(module)}
    found: tuple[dict[str, str] | None, dict[str, set[str]]] = None, {}
    if adapted and (peers.place.is_first or is_split):
        bases = [base_of(module, num_ranks=peers.place.world_size) for module in adapted.values()]
        if peers.place.is_first:
            left_out = {name: left_to_base(module) for name, module in adapted.items()}
            found = _joined({name: base for name, base in zip(adapted, bases, strict=True) if base}), left_out
    return peers.from_first(found)


def _joined(bases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    if len(bases) == 1:
        return dict(*bases.values())
    digester = Digester()
    for name, base in bases.items():
        digester.update(f"{name} {base['digest']}\n".encode())
    names, revisions = ([base[field] for base in bases.values() if base[field]] for field in ("name", "revision"))
    return {"name": " and ".join(names), "revision": " and ".join(revisions), "digest": digester.digest}
