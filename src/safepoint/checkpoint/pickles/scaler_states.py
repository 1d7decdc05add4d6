"""Checks the states of gradient scalers that are loaded from a checkpoint. An attacker may have written it.

A scaler of torch loads its numbers without a check. If the scale is 0, all weights become NaN. If the scale is
infinite, each step is left out. In both cases the training would continue without an error, and each later checkpoint
would contain the result. Numbers of another kind raise an error in a later step.
"""

import contextlib
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import printable
from safepoint.foundation.field_types import NAMED, NUMBER, Kind, whole

_MOST = torch.finfo(torch.float32).max
"""A scaler keeps its scale in 32 bits."""
_MOST_STEPS = (1 << 31) - 1
SCALE = Kind(
    words="a positive number that 32 bits can represent", fits=lambda value: NUMBER.fits(value) and 0 < value <= _MOST
)
"""The valid values of a loss scaler's scale, and of the factors by which the scaler multiplies the scale."""
_KINDS = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), SCALE),
    "growth_interval": whole(1, _MOST_STEPS),
    "_growth_tracker": whole(0, _MOST_STEPS),
}


def checked_scalers(where: object) -> contextlib.AbstractContextManager[None]:
    """While the block runs, check the state that any gradient scaler of torch loads.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.

    Raises:
        CheckpointError: a state has a number with which the scaler could not continue.
    """
    kind: Any = GradScaler
    original = kind.load_state_dict

    def load_state_dict(self: GradScaler, state_dict: Any) -> None:
        if self.is_enabled():
            _check(state_dict, where)
        original(self, state_dict)

    return temporarily(kind, load_state_dict=load_state_dict)


def _check(state: Any, where: object) -> None:
    try:
        NAMED.check("it", state)
        for name, kind in _KINDS.items():
            if name in state:  # torch itself refuses a state that lacks an entry
                kind.check(name, state[name])
    except ValueError as error:
        raise refusal(
            where,
            f"the state of its gradient scaler is invalid: {printable(str(error))}",
            "a scale of 0 means that the gradients were not finite for many steps before the save",
        ) from error
