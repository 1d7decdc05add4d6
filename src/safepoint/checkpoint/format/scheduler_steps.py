"""How often the schedulers of a run can have stepped before a checkpoint was written.

A scheduler calls a function of the script with its count. A count can be too large for such a function:
`2 ** (count // 2)` takes days and fills the memory. So the step of a checkpoint limits the counts in it.
"""

import contextlib
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.verify import read_manifest_of_any
from safepoint.errors import SafepointError

_MOST_FACTOR = 4096
"""The greatest accepted number of ranks and of micro-batches in a step. A manifest may state any number."""
_SPARE_FACTOR = 16
"""A script may step several optimizers in one step, and call each scheduler several times."""
_SPARE_STEPS = 64


def most_scheduler_steps(folder: Path, *, spare: int = _SPARE_FACTOR) -> int | None:
    """The largest count that a scheduler in a checkpoint can have.

    Accelerate steps a scheduler once for each rank, and scripts step it once for each micro-batch, each step or each
    epoch.

    Args:
        folder: the folder of the checkpoint.
        spare: how often a scheduler may have stepped for each rank, and for each micro-batch, of a step.

    Returns:
        The count; None if the folder has no manifest and does not have the name of a checkpoint.
    """
    with contextlib.suppress(SafepointError, OSError):
        manifest = read_manifest_of_any(folder)
        return _most(manifest.step, manifest.world_size + manifest.gradient_accumulation, spare)
    step = step_of(folder)
    return None if step is None else _most(step, _MOST_FACTOR, spare)


def _most(step: int, factor: int, spare: int) -> int:
    return (step + _SPARE_STEPS) * min(factor, _MOST_FACTOR) * spare
