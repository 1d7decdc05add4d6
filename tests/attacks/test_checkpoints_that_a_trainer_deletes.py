"""The state of a checkpoint names the best one, and the Trainer of transformers deletes all others when it ends.

It does so with `save_total_limit=1`, also with the newest checkpoint, with those of other runs, and with those that
another program reads. Safepoint alone deletes checkpoints, by its own rules.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import commit, prepared

pytest.importorskip("transformers")


def test_the_trainer_deletes_none_when_it_ends(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from safepoint.training.integrations.transformers.run import TrainerRun

    output = prepared(tmp_path / "out")
    for step in (10, 20, 30):
        commit(output, step)
    arguments = TrainingArguments(output_dir=str(output.root), save_total_limit=1, use_cpu=True, report_to=[])
    trainer: Any = Trainer(model=torch.nn.Linear(2, 2), args=arguments)
    trainer.callback_handler.callbacks = []
    trainer.state.best_model_checkpoint = str(output.root / "checkpoint-10")
    trainer.state.global_step = trainer.state.max_steps = 30
    trainer._tr_loss, trainer._total_loss_scalar, trainer._initial_global_step = torch.tensor(0.0), 0.0, 0
    own: Any = object.__new__(TrainerRun)
    own._trainer = trainer
    own._boundary = SimpleNamespace(save_last_step=lambda: None, report_end=lambda: None)
    own._callbacks = SimpleNamespace(notify=lambda: None)
    own._start = SimpleNamespace(complete=None)
    own._resume = SimpleNamespace(elapsed_s=0.0)
    own._report_progress = lambda: None
    own._finalize(trainer._finalize_training, None, 8, 0.0)
    names = {path.name for path in output.root.iterdir() if path.name.startswith("checkpoint-")}
    assert names == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}
    assert arguments.save_total_limit == 1
