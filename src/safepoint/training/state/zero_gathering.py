"""A weight that ZeRO-3 has split, whole for a moment."""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def gathered(weight: Any, *, is_changed: bool = False) -> Generator[bool]:
    """Have `weight` whole, on all ranks, which all call it; of any other weight nothing needs to be done.

    Args:
        weight: a parameter, split or not.
        is_changed: whether it is written; of a split one, by the first rank alone, and the others get that.

    Yields:
        Whether this rank is to write it.
    """
    if not hasattr(weight, "ds_id"):
        yield True
        return
    deepspeed: Any = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if is_changed else None):
        yield deepspeed.comm.get_rank() == 0
