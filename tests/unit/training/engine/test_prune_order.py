"""When a synchronous save prunes older checkpoints."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.training.engine.saves import Saves
from safepoint.training.integrations.transformers.save_callbacks import SaveCallbacks


@pytest.mark.parametrize("has_callbacks", [False, True])
def test_a_save_prunes_unless_callbacks_follow(has_callbacks: bool) -> None:
    """Files that callbacks add make the new checkpoint invalid at first: the older one must remain until then."""
    saves: Any = object.__new__(Saves)
    saves._loop = SimpleNamespace(step=3, has_callbacks=has_callbacks)
    saves._context, saves._saver, saves._agreement = MagicMock(), MagicMock(), MagicMock()
    saves._snapshots = MagicMock()
    saves._context.progress.during.return_value = contextlib.nullcontext()
    saves._saver.save.return_value = 0.5
    saves._save_and_wait(Trigger.PERIODIC, MagicMock())
    assert saves._saver.prune.called != has_callbacks


def test_callbacks_files_are_named_before_older_checkpoints_are_pruned() -> None:
    """Also when a callback fails."""
    calls: list[str] = []
    boundary = MagicMock()
    boundary.saves.step, boundary.saves.pending_step = 3, None
    boundary.saver.adopt_added_files.side_effect = lambda: calls.append("name")
    boundary.saver.prune.side_effect = lambda: calls.append("prune")
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=3))
    callbacks = SaveCallbacks(MagicMock(), trainer, MagicMock(), boundary)

    def fail(*_: Any) -> None:
        calls.append("call")
        raise RuntimeError("a callback failed")

    with pytest.raises(RuntimeError):
        callbacks.on_save(fail, None, None, None)
    assert calls == ["call", "name", "prune"]
