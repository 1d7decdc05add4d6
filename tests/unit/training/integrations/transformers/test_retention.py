"""Which checkpoints a script's Trainer keeps."""

from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.training.integrations.transformers.trainer_loop import TrainerLoop


@pytest.mark.parametrize(("limit", "kept"), [(None, None), (0, None), (-1, None), (1, 1), (3, 3)])
def test_a_limit_below_one_keeps_all(limit: int | None, kept: int | None) -> None:
    """As in transformers; the keeper refuses a negative number, and the best checkpoint is protected."""
    loop: Any = object.__new__(TrainerLoop)
    loop._trainer = SimpleNamespace(
        args=SimpleNamespace(save_total_limit=limit),
        state=SimpleNamespace(best_model_checkpoint="out/checkpoint-20"),
    )
    assert loop.retention() == (kept, {20})
