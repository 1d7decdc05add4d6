"""Differences between the releases of PEFT.

| releases | difference | here |
|---|---|---|
| 0.21 | finds adapters by the names of modules, to which FSDP1 adds; saves none | `loses_adapters_under_fsdp1` |
"""

import importlib
from typing import Any

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What FSDP1, and its checkpoints of activations, add to the names of modules, and not to those of a state dict."""


def loses_adapters_under_fsdp1() -> bool:
    """Whether this release saves and loads no adapters of models under FSDP1."""
    library: Any = importlib.import_module("peft.tuners.tuners_utils")
    return hasattr(library, "_get_tuner_state_dict_key_prefixes")


def without_wrappers(name: str) -> str:
    """The name that a parameter or module has in a state dict: without FSDP1's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
