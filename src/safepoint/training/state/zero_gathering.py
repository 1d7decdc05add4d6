"""Gathers a weight that ZeRO-3 has partitioned."""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def gathered(weight: Any, *, is_changed: bool = False) -> Generator[bool]:
    """Make a partitioned `weight` whole while the block runs. A weight that is not partitioned stays as it is.

    All ranks use this context manager together.

    Args:
        weight: a parameter, partitioned or not.
        is_changed: whether the block writes to `weight`. Only the first rank writes a partitioned weight, and the
            other ranks receive the result.

    Yields:
        Whether this rank writes the weight: True on the first rank, or on every rank if the weight is not
        partitioned.
    """
    if not hasattr(weight, "ds_id"):
        yield True
        return
    deepspeed: Any = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0 if is_changed else None):
        yield deepspeed.comm.get_rank() == 0
