"""Differences between the releases of PEFT.

| releases | difference | here |
|---|---|---|
| 0.21 | finds adapters by the names of modules, which FSDP1's wrappers change, and saves and loads none | `find_adapters` |
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

_PREFIXES = "_get_tuner_state_dict_key_prefixes"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What FSDP1, and its checkpoints of activations, add to the names of modules, and not to those of a state dict."""


def find_adapters() -> None:
    """Make PEFT find the adapters of models under FSDP1, in this process, if PEFT is imported."""
    if "peft" not in sys.modules:
        return
    library: Any = importlib.import_module("peft.tuners.tuners_utils")
    original = getattr(library, _PREFIXES, None)
    if original is not None and not isinstance(original, functools.partial):
        setattr(library, _PREFIXES, functools.partial(_prefixes, original))


def _prefixes(original: Callable[..., set[str]], *args: Any, **kwargs: Any) -> set[str]:
    return {without_wrappers(prefix) for prefix in original(*args, **kwargs)}


def without_wrappers(name: str) -> str:
    """The name that a parameter or module has in a state dict: without FSDP1's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


__all__ = ["find_adapters", "without_wrappers"]
