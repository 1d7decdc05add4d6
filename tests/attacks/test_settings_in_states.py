"""States of a checkpoint with numbers in the place of the script's settings.

The script decides how a step and an evaluation are computed. A checkpoint of another person must not change the
weight of a part of the loss, or let an evaluation generate texts without end.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainerState

from safepoint.training.integrations.transformers.resume import trainer_resume
from safepoint.training.integrations.transformers.resume.accumulators import restore_accumulators, without_settings
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.generation_settings import (
    generation_settings,
    load_generation_settings,
)
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume


class Weighted(Trainer):
    """With settings of its own, counts, and a setting that changes while it trains."""

    clip = 0.2

    def __init__(self, weights: list[float], beta: float = 0.1) -> None:
        self.args: Any = SimpleNamespace(max_length=64, thresholds=[1.0, 2.0])
        self.weights, self.beta, self.max_length = weights, beta, self.args.max_length
        self.thresholds = self.args.thresholds
        self.temperature = 1.0
        self.seen, self.annealed, self.by_callback, self.by_function = 0, 1.0, 0, 0
        self.total = 0.0
        self.recent: list[float] = []
        self.callback_handler: Any = SimpleNamespace(callbacks=[Counting(self)])

    def compute_loss(self, *_: Any) -> Any:
        self.seen += 1
        self.recent.append(self.beta * self.clip)
        self._anneal()
        return self.weights, self.thresholds, self.temperature

    def _anneal(self) -> None:
        def inner() -> None:
            self.annealed = self.annealed * 0.9

        inner()

    @property
    def mean(self) -> float:
        self.total += 1
        return self.total


class Counting(TrainerCallback):
    def __init__(self, trainer: Weighted) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.by_callback += 1


def metrics(trainer: Weighted) -> None:
    trainer.by_function += 1


_SETTINGS: dict[str, Any] = {
    "beta": -1e9, "clip": 0.0, "max_length": 1 << 40, "temperature": 1e9, "weights": [0.0, 9.0], "thresholds": [0.0],
}  # fmt: skip
_COUNTS: dict[str, Any] = {
    "seen": 5, "annealed": 0.5, "by_callback": 6, "by_function": 7, "total": 8.0, "recent": [1.0, 2.0],
}  # fmt: skip


def test_numbers_of_a_trainer() -> None:
    trainer = Weighted([0.5, 0.5])
    own = {name: getattr(trainer, name) for name in _SETTINGS}
    numbers, others = without_settings(trainer, {**_SETTINGS, **_COUNTS, 5: 1, "unknown": 2})
    restore_accumulators(trainer, numbers)
    assert {name: getattr(trainer, name) for name in _SETTINGS} == own
    assert {name: getattr(trainer, name) for name in _COUNTS} == _COUNTS
    assert set(others) == set(_SETTINGS)


@pytest.mark.parametrize("saved", [None, 5, [1], {}, {"beta": "x"}, {"beta": 0.1}])
def test_nothing_to_leave_out(saved: Any) -> None:
    """No warning, if the value is that of the script."""
    trainer = Weighted([0.5, 0.5])
    assert without_settings(trainer, saved)[1] in ([], ["beta"] if saved == {"beta": "x"} else [])


def test_a_resume_says_so(caplog: pytest.LogCaptureFixture) -> None:
    resume: Any = object.__new__(TrainerResume)
    resume._trainer, resume._context = Weighted([0.5, 0.5]), SimpleNamespace(log=logging.getLogger("safepoint"))
    counted = TrainerCounters(numbers={**_SETTINGS, **_COUNTS})
    with caplog.at_level(logging.WARNING, "safepoint"):
        assert resume._counted_in(SimpleNamespace(counted=counted)).numbers == _COUNTS
    assert "other values for beta, clip, max_length, temperature, thresholds, weights of the trainer" in caplog.text
    assert "sets these attributes after the trainer is made, so they are settings of the script" in caplog.text


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "another value for a00 of the trainer. No code of the script sets this attribute after"),
        (11, "a09, and 1 other of the trainer. No code of the script sets these attributes after"),
        (13, "a09, and 3 others of the trainer."),
    ],
)
def test_the_message_counts_the_attributes(
    count: int, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number:02}" for number in range(count)]
    monkeypatch.setattr(trainer_resume, "without_settings", lambda *_: ({}, names))
    resume: Any = object.__new__(TrainerResume)
    resume._trainer, resume._context = None, SimpleNamespace(log=logging.getLogger("safepoint"))
    resume._counted_in(SimpleNamespace(counted=TrainerCounters(numbers={})))
    assert words in caplog.text


@pytest.mark.parametrize("trial", [None, "the trial of the script"])
def test_trials_of_a_search(trial: str | None) -> None:
    """TensorBoard's callback writes into the folder that the name of the trial leads to, when the training begins."""
    state = TrainerState(is_hyper_param_search=True, trial_name="/home/user/evil")
    resume: Any = object.__new__(TrainerResume)
    resume._trainer, resume._point = SimpleNamespace(state=state, _trial=trial), None
    resume._load_callbacks(lambda: None)
    assert (state.is_hyper_param_search, state.trial_name) == (trial is not None, None)


# ---- generating --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_beams": 10**6}, {"max_length": 10**12}, {"max_new_tokens": 10**12}, {"cache_implementation": "static"},
        {"stop_strings": ["a"] * 1000}, {"suppress_tokens": [1, 2]}, {"dola_layers": "high"}, {"min_length": 10**9},
        {"temperature": -5.0}, {"max_new_tokens": "x"}, {"early_stopping": "maybe"}, {"do_sample": 0},
        {"num_beams": 1.0},
    ],
)  # fmt: skip
def test_settings_for_generating(change: dict[str, Any]) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(max_length=20))
    own = generation_settings(model)
    load_generation_settings(model, {**own, **change})
    assert generation_settings(model) == own


@pytest.mark.skipif(
    not hasattr(GenerationConfig, "_get_default_generation_params"), reason="transformers below 5.0 completes nothing"
)
def test_what_an_evaluation_sets() -> None:
    first, second = (SimpleNamespace(generation_config=GenerationConfig(top_k=7)) for _ in range(2))
    first.generation_config.update(**first.generation_config._get_default_generation_params(), defaults_only=True)
    first.generation_config._from_model_config = False
    load_generation_settings(second, generation_settings(first))
    assert vars(second.generation_config) == vars(first.generation_config)
