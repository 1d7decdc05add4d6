"""Numbers that a trainer adds up, found by their values; and the settings that an evaluation changes."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.generation_settings import (
    generation_settings,
    restore_generation_settings,
)


class Averaging:
    """As the trainers of GOLD and OnlineDPO, and as a subclass in a script."""

    num_calls = 0

    def __init__(self) -> None:
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.model = torch.nn.Linear(2, 2)
        self.beta = 0.1
        self.name = "mine"
        self.is_warm = False
        self.current_flos = 3.0  # the Trainer's own
        self._on_policy_loss_total = 0.0
        self.recent: deque[float] = deque(maxlen=3)
        self.stats: dict[str, list[float]] = {"objective/kl": []}
        self.sums: Any = {"train": defaultdict(list), "eval": defaultdict(list)}

    def step(self) -> None:
        self._on_policy_loss_total += 0.5
        self.recent.append(self._on_policy_loss_total)
        self.stats["objective/kl"].append(1.5)
        self.sums["train"]["loss"].append(2)
        self.num_calls += 1
        self.is_warm = True
        self.name = "theirs"
        self.current_flos += 1


def test_numbers_that_training_has_changed() -> None:
    """The settings of the script stay as they are."""
    first = Averaging()
    begin = TrainerCounters.of(first)
    for _ in range(4):
        first.step()
    saved = TrainerCounters.of(first).since(begin)
    assert set(saved.numbers) == {"_on_policy_loss_total", "recent", "stats", "sums", "num_calls"}
    resumed = Averaging()
    resumed.beta = 0.2
    recent = resumed.recent
    saved.restore(resumed)
    assert (resumed._on_policy_loss_total, list(recent), resumed.stats) == (2.0, [1.0, 1.5, 2.0], first.stats)
    assert resumed.recent is recent
    assert recent.maxlen == 3
    assert isinstance(resumed.sums["train"], defaultdict)
    assert resumed.sums == first.sums
    assert resumed.num_calls == 4
    assert (resumed.beta, resumed.name, resumed.current_flos, resumed.is_warm) == (0.2, "mine", 3.0, False)


def test_a_copy_does_not_change_with_the_trainer() -> None:
    trainer = Averaging()
    before = TrainerCounters.of(trainer)
    trainer.step()
    before.restore(trainer)
    assert (trainer._on_policy_loss_total, list(trainer.recent), trainer.sums["train"]) == (0.0, [], {})


@pytest.mark.parametrize(
    "hostile",
    [
        {"step": 5},
        {"model": 1.0},
        {"name": "x"},
        {"current_flos": 1e30},
        {"stats": 3},
        {"beta": {}},
        {"other": 1},
        {"is_warm": 1},
        [1],
    ],
)
def test_other_attributes_are_not_set(hostile: Any) -> None:
    trainer = Averaging()
    before = {name: repr(value) for name, value in vars(trainer).items()}
    TrainerCounters(numbers=hostile).restore(trainer)
    assert {name: repr(value) for name, value in vars(trainer).items()} == before


@pytest.mark.skipif(
    not hasattr(GenerationConfig, "_get_default_generation_params"), reason="transformers below 5.0 completes nothing"
)
def test_what_an_evaluation_changes_in_the_settings_for_generating() -> None:
    """Seq2SeqTrainer completes them when it has generated for the first time."""
    first, second = (SimpleNamespace(generation_config=GenerationConfig()) for _ in range(2))
    defaults = first.generation_config._get_default_generation_params()
    first.generation_config.update(**defaults, defaults_only=True)
    first.generation_config._from_model_config = False
    assert first.generation_config.to_dict() != second.generation_config.to_dict()
    restore_generation_settings(second, generation_settings(first))
    assert vars(first.generation_config) == vars(second.generation_config)


@pytest.mark.parametrize("hostile", [{"to_dict": 5}, {"new": 1}, {"max_length": {}}, {"max_length": object()}, 3])
def test_other_settings_are_not_set(hostile: Any) -> None:
    from transformers import GenerationConfig

    model = SimpleNamespace(generation_config=GenerationConfig(max_length=7))
    before = dict(vars(model.generation_config))
    restore_generation_settings(model, hostile)
    assert vars(model.generation_config) == before


def test_a_model_that_does_not_generate() -> None:
    assert generation_settings(torch.nn.Linear(1, 1)) == {}
    restore_generation_settings(torch.nn.Linear(1, 1), {"max_length": 3})
