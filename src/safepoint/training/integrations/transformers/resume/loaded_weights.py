"""Whether the Trainer has given the model every weight of a checkpoint, and the help where it cannot.

The Trainer loads weights by name and only warns of what it does not find: such a weight would go on from what the
script made of it, beside the optimizer's old moments. Of some models (experts that are one tensor in memory and many
in files) transformers writes other names and shapes than the model has, and the Trainer finds none of them.
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
    """Load what the Trainer did not find, where transformers knows under which names it was saved.

    Args:
        model: that was loaded, not yet wrapped for training.
        missing: names of which the Trainer found nothing.
        folder: the checkpoint.
        step: of it.

    Raises:
        ConflictError: a weight is not in the checkpoint.
    """
    lost = lost_weights(model, missing)
    if not lost:
        return
    if _is_converted(model):
        try:
            lost = lost_weights(model, _load_converted(model, folder))
        except Exception as error:  # noqa: BLE001  what follows says what is missing, and stops
            _log.warning("from_pretrained cannot load %s: %s", folder, error)
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConflictError(
            f"the checkpoint of step {step} has no weight {lost[0]}{others}, which the model has: it would go on "
            "with fresh values; training was not started",
            hint="make the model as it was when the run began, or begin anew with --from-scratch",
        )


def lost_weights(model: Any, missing: Iterable[str]) -> list[str]:
    """Of the names of which nothing was found, those of parameters that have no other name, and that are saved."""
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
    """Whether transformers may have written other names than the model's."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return False
    return bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))


def _load_converted(model: Any, folder: Path) -> list[str]:
    """Load through `from_pretrained`, which converts; the names of which it found nothing.

    A second model is in memory for a moment, in the widest type of the first one's: no bit is lost.
    """
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    widest = max(types, key=lambda kind: (kind.itemsize, kind is not torch.float16)) if types else torch.float32
    if {torch.float16, torch.bfloat16} <= types and widest.itemsize == torch.float16.itemsize:
        widest = torch.float32
    _log.info("weights of %s are saved under other names than the model's: loading them by these", folder.name)
    kind = cast("Any", type(model))
    other, report = kind.from_pretrained(folder, dtype=widest, output_loading_info=True)
    fresh: set[str] = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    state = {name: tensor for name, tensor in other.state_dict().items() if name not in fresh}
    return model.load_state_dict(state, strict=False).missing_keys
