"""Differences between the releases of PEFT.

| releases | difference | handled by |
|---|---|---|
| 0.21 | saves no adapters under FSDP1, which changes the names of modules | `loses_adapters_under_fsdp1` |
"""

import importlib
from typing import Any

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""FSDP1 and activation checkpointing add these texts to the names of modules. A state dict has names without them."""


def loses_adapters_under_fsdp1() -> bool:
    """Whether this release fails to save and to load the adapters of models under FSDP1."""
    library: Any = importlib.import_module("peft.tuners.tuners_utils")
    return hasattr(library, "_get_tuner_state_dict_key_prefixes")


def without_wrappers(name: str) -> str:
    """The name of a parameter or module in a state dict, which has no names of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
