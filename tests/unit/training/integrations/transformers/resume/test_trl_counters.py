"""What TRL's trainers count, through a rank's file and back."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState


class Online:
    """As TRL's trainers that generate, where `__module__` says so."""

    __module__ = "trl.trainer.online_trainer"

    def __init__(self) -> None:
        self.args = SimpleNamespace(steps_per_generation=2, device=torch.device("cpu"))
        self.model = torch.nn.Linear(2, 2)
        self.num_iterations = 2
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0
        self._step = 0
        self._buffered_inputs: Any = None


def through_a_file(counted: TrainerCounters, folder: Path, *, world_size: int = 2) -> TrainerCounters:
    loss = LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0)
    for rank in range(2):
        RankState(loss=loss, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0, counted=counted).write(folder, rank)
    state = RankState.read(folder, rank=0, ranks_before=2, world_size=world_size)
    assert state is not None
    return state.counted


def counting() -> Online:
    trainer = Online()
    trainer._metrics["train"]["entropy"] += [1.5, 2.5]
    trainer._total_train_tokens, trainer._step = 77, 3
    trainer._buffered_inputs = [{"ids": torch.arange(4), "tools": None}, {"ids": torch.ones(2)}]
    trainer.model.eval()
    return trainer


def test_a_trainer_goes_on_counting(tmp_path: Path) -> None:
    """In the containers that it has made, with the completions that are left and in the same mode."""
    trainer = Online()
    metrics = trainer._metrics["train"]
    metrics["of before"].append(9.0)
    through_a_file(TrainerCounters.of(counting()), tmp_path).restore(trainer)
    assert trainer._metrics["train"] is metrics
    assert metrics == {"entropy": [1.5, 2.5]}
    metrics["new"].append(1.0)  # still one that makes lists
    assert (trainer._total_train_tokens, trainer._step) == (77, 3)
    assert torch.equal(trainer._buffered_inputs[0]["ids"], torch.arange(4))
    assert not trainer.model.training


def test_later_counts_do_not_change_what_was_taken() -> None:
    """A moment that is gone back to is that moment."""
    trainer = counting()
    counted = TrainerCounters.of(trainer)
    trainer._metrics["train"]["entropy"].append(3.5)
    trainer._metrics["train"]["new"].append(3.5)
    trainer._step += 1
    counted.restore(trainer)
    assert trainer._metrics["train"] == {"entropy": [1.5, 2.5]}
    assert trainer._step == 3


def test_completions_are_kept_while_they_are_needed() -> None:
    """After the last step that uses them they are not."""
    trainer = counting()
    trainer._step = 4
    assert "_buffered_inputs" not in TrainerCounters.of(trainer).cycle


def test_another_number_of_ranks_keeps_figures_only(tmp_path: Path) -> None:
    """Completions are those of a rank."""
    counted = through_a_file(TrainerCounters.of(counting()), tmp_path, world_size=1)
    assert counted.figures["_total_train_tokens"] == 77
    assert not counted.cycle


def test_what_could_run_code_is_left_out(tmp_path: Path) -> None:
    """A file that could not be read again without running something would make the checkpoint useless."""
    trainer = counting()
    trainer._metrics["train"]["odd"] = object()
    trainer._buffered_inputs[0]["tools"] = object()
    counted = through_a_file(TrainerCounters.of(trainer), tmp_path)
    assert counted.figures == {"_total_train_tokens": 77}
    assert not counted.cycle


def test_other_trainers_are_left_alone() -> None:
    """Attributes of the same names are somebody else's."""
    trainer: Any = counting()
    trainer.__class__ = type("Own", (), {})
    counted = TrainerCounters.of(trainer)
    assert counted.since(counted) == TrainerCounters()
    TrainerCounters(figures={"_step": 1}).restore(trainer)
    assert trainer._step == 3
    with pytest.raises(AttributeError):
        TrainerCounters.of(Online.__new__(Online))
