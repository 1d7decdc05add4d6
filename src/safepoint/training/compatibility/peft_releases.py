"""Differences between the releases of PEFT.

| releases | difference | handled by |
|---|---|---|
| 0.21 | looks for adapters by module names, which FSDP1 changes; so it saves none | `loses_adapters_under_fsdp1` |
"""

import importlib
from typing import Any

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""FSDP1 and activation checkpointing add these to the names of modules, but not to the names in a state dict."""


def loses_adapters_under_fsdp1() -> bool:
    """Whether this release fails to save and to load the adapters of models under FSDP1."""
    library: Any = importlib.import_module("peft.tuners.tuners_utils")
    return hasattr(library, "_get_tuner_state_dict_key_prefixes")


def without_wrappers(name: str) -> str:
    """The name that a parameter or module has in a state dict: without FSDP1's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
