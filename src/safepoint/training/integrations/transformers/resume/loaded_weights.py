"""Checks that the Trainer has loaded every weight of a checkpoint, and loads those that it cannot find.

The Trainer loads weights by name and only warns about missing ones. Such a weight would keep the script's fresh
values, beside the old moments of the optimizer. For some models (experts that are one tensor in memory and many in
files) transformers writes other names and shapes than the model has, and the Trainer finds none of these weights.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from safepoint.errors import ConflictError

_log = logging.getLogger("safepoint")


def complete_load(model: Any, missing: Iterable[str], folder: Path, *, step: int) -> None:
    """Load the weights that the Trainer did not find, where transformers knows their names in the file.

    Args:
        model: as the Trainer has loaded it, not yet wrapped for training.
        missing: names that the Trainer did not find.
        folder: the checkpoint.
        step: of the checkpoint.

    Raises:
        ConflictError: a weight is not in the checkpoint.
    """
    lost = lost_weights(model, missing)
    if not lost:
        return
    if _is_converted(model):
        try:
            lost = lost_weights(model, _load_converted(model, folder))
        except Exception as error:  # noqa: BLE001  the error below names what is missing
            _log.warning("from_pretrained cannot load %s: %s", folder, error)
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConflictError(
            f"the checkpoint of step {step} lacks the model's weight {lost[0]}{others}, which would keep its initial "
            "values; training was not started",
            hint="make the model as it was in that run, or start from the beginning with --from-scratch",
        )


def lost_weights(model: Any, missing: Iterable[str]) -> list[str]:
    """Of the missing names, those of parameters that are saved and were not found under another name."""
    names = set(missing)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found = {id(parameter) for name, parameter in parameters.items() if name not in names}
    found |= {parameter.data_ptr() for name, parameter in parameters.items() if name not in names}
    left_out = [re.escape(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    left_out += getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return [
        name
        for name, parameter in parameters.items()
        if name in names
        and parameter.numel()
        and not {id(parameter), parameter.data_ptr()} & found
        and not any(re.search(pattern, name) for pattern in left_out)
    ]


def _is_converted(model: Any) -> bool:
    """Whether transformers may write other names than the model's."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return False
    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def _load_converted(model: Any, folder: Path) -> list[str]:
    """Load through `from_pretrained`, which converts names; returns the names that it did not find.

    A second model is in memory meanwhile, in the widest type of the first one, so that no bit is lost.
    """
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    widest = max(types, key=lambda kind: (kind.itemsize, kind is not torch.float16)) if types else torch.float32
    if {torch.float16, torch.bfloat16} <= types and widest.itemsize == torch.float16.itemsize:
        widest = torch.float32
    _log.info("the weights of %s have other names than the model's: loading them with from_pretrained", folder.name)
    kind = cast("Any", type(model))
    other, report = kind.from_pretrained(folder, dtype=widest, output_loading_info=True)
    fresh: set[str] = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    state = {name: tensor for name, tensor in other.state_dict().items() if name not in fresh}
    return model.load_state_dict(state, strict=False).missing_keys
