"""Differences between the releases of Accelerate.

| releases | difference | handled by |
|---|---|---|
| all | FSDP1 with SHARDED_STATE_DICT: a new optimizer has no state, so none is loaded | `complete_fsdp` |
| below 1.13 | FSDP2 with SHARDED_STATE_DICT: the same | `complete_fsdp` |
| below 1.15 | FSDP2 with FULL_STATE_DICT: a rank saves and loads only its shards of an adapter | `complete_fsdp` |
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_LOAD_OPTIMIZER = "load_fsdp_optimizer"
_IMPORTERS = ("accelerate.utils.fsdp_utils", "accelerate.utils", "accelerate.accelerator", "transformers.trainer")
"""The modules that have `load_fsdp_optimizer` as an attribute."""


def complete_fsdp() -> None:
    """Make Accelerate save and load the whole state of models and optimizers under FSDP, in this process.

    A second call changes only modules that were imported after the first call.
    """
    library: Any = importlib.import_module("accelerate.utils.fsdp_utils")
    current = getattr(library, _LOAD_OPTIMIZER)
    loading = current if isinstance(current, _OptimizerLoading) else _OptimizerLoading(current)
    for module in filter(None, map(sys.modules.get, _IMPORTERS)):
        if getattr(module, _LOAD_OPTIMIZER, None) is loading.original:
            setattr(module, _LOAD_OPTIMIZER, loading)
    if not _names(library._get_model_state_dict, "ignore_frozen_params"):
        library._get_model_state_dict = _AdapterState(library._get_model_state_dict, library.is_peft_model).read
        library._set_model_state_dict = _AdapterState(library._set_model_state_dict, library.is_peft_model).write


class _OptimizerLoading:
    """Replaces `load_fsdp_optimizer`.

    DCP (`torch.distributed.checkpoint`) loads only the entries that the given state already has. The state of a new
    optimizer has no entries for parameters, so this class first creates these entries.

    Args:
        original: Accelerate's function.
    """

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        self._creates_entries = _names(original, "get_optimizer_state_dict")

    def __call__(
        self,
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        input_dir: str | os.PathLike[str],
        optimizer_index: int = 0,
        **options: Any,
    ) -> None:
        is_loaded = self._creates_entries and fsdp_plugin.fsdp_version != 1
        is_sharded = "SHARDED" in str(fsdp_plugin.state_dict_type)
        if is_loaded or not is_sharded or not options.get("use_dcp", True):
            self.original(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, **options)
            return
        accelerator.wait_for_everyone()
        _load_shards(optimizer, model, Path(input_dir) / f"optimizer_{optimizer_index}")
        accelerator.wait_for_everyone()


def _load_shards(optimizer: Any, model: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    optimizer = innermost(optimizer)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer without its wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class _AdapterState:
    """Replaces Accelerate's functions that read and write the state of a model under FSDP.

    If Accelerate requests the whole state of adapters, the replacement reads or writes it. For all other requests, it
    calls the original function.

    Args:
        original: Accelerate's function.
        is_peft_model: returns whether a model has adapters.
    """

    def __init__(self, original: Callable[..., Any], is_peft_model: Callable[[Any], bool]) -> None:
        self._original = original
        self._is_peft_model = is_peft_model

    def read(self, model: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        """Replaces `_get_model_state_dict`."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if not self._applies(model, adapter_only, sd_options):
            return self._original(model, adapter_only=adapter_only, sd_options=sd_options)
        return get_model_state_dict(model, options=dataclasses.replace(sd_options, ignore_frozen_params=True))

    def write(self, model: Any, state_dict: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        """Replaces `_set_model_state_dict`."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        if not self._applies(model, adapter_only, sd_options):
            return self._original(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)
        return set_model_state_dict(model, state_dict, options=dataclasses.replace(sd_options, strict=False))

    def _applies(self, model: Any, adapter_only: bool, sd_options: Any) -> bool:
        return adapter_only and sd_options is not None and sd_options.full_state_dict and self._is_peft_model(model)


def _names(function: Any, name: str) -> bool:
    """Whether the code of a function contains `name` as a variable, an attribute, or a keyword of a call."""
    code = function.__code__
    keywords: list[Any] = [constant for constant in code.co_consts if isinstance(constant, tuple)]
    return name in {*code.co_names, *code.co_varnames} or any(name in names for names in keywords)


__all__ = ["complete_fsdp", "innermost"]
