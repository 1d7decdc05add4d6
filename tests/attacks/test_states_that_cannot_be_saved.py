"""States that are loaded, and with which each later save fails or writes something wrong.

The training would go on, and would lose all its steps when it is interrupted.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from safepoint.checkpoint.format.manifest import MAX_SAMPLES
from safepoint.errors import CheckpointError, ExitCode
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.field_types import NUMBER, finite
from safepoint.training.integrations.transformers.resume.accumulators import restore_accumulators
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters, restore_callbacks
from safepoint.training.integrations.transformers.resume.state_fields import check_trainer_state
from safepoint.training.integrations.transformers.trainer_loop import _metrics_at
from tests.support.checkpoints import reseal
from tests.support.jobs import TINY, no_orphans, safepoint

_HUGE = 10**400
"""A whole number that is larger than any float."""
_STATE = {
    "epoch": 0.5,
    "global_step": 4,
    "max_steps": 8,
    "train_batch_size": 8,
    "log_history": [{"loss": 1.0, "step": 2}],
}


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [_HUGE, [-_HUGE], {"b": _HUGE}])
def test_a_number_in_json(value: object) -> None:
    with pytest.raises(ValueError, match="401 digits"):
        parse_object(json.dumps({"a": value, "c": 1}))
    assert parse_object(json.dumps({"a": 10**308, "b": f"{_HUGE}"}))


@pytest.mark.parametrize("kind", [NUMBER, finite()])
def test_a_number_in_a_state(kind: Any) -> None:
    for value in (_HUGE, -_HUGE):
        with pytest.raises(ValueError, match="total"):
            kind.check("total", value)
    kind.check("total", 10**300)


@pytest.mark.parametrize("field", ["epoch", "best_metric", "total_flos", "num_input_tokens_seen", "max_steps"])
def test_a_number_in_the_state_of_a_trainer(field: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({**_STATE, field: _HUGE}))
    with pytest.raises(CheckpointError, match="digits"):
        check_trainer_state(path, step=4)


def test_a_count_of_a_trainer() -> None:
    trainer = SimpleNamespace(total=1, totals={"a": 1})
    restore_accumulators(trainer, {"total": _HUGE, "totals": {"a": _HUGE}})
    assert (trainer.total, trainer.totals) == (1, {"a": 1})
    restore_accumulators(trainer, {"total": 5, "totals": {"a": 6}})
    assert (trainer.total, trainer.totals) == (5, {"a": 6})


# ---- the log -----------------------------------------------------------------------------------------------------


def test_a_log_of_later_steps() -> None:
    """Its entries would be the metrics of checkpoints that are not written yet."""
    from safepoint.training.integrations.transformers.resume.trainer_log import trusted_history

    past: list[dict[str, Any]] = [{"loss": 1.0, "step": 2}, {"eval_loss": 1.0, "step": 4}, {"note": "x"}]
    later: list[dict[str, Any]] = [{"eval_loss": -5.0, "step": step} for step in (5, 6.0, float("inf"))]
    found = trusted_history([*past, *later], step=4)
    assert found == past
    assert _metrics_at(SimpleNamespace(log_history=found), 6) == {}


@pytest.mark.parametrize("kind", ["deep", "long", "flat"])
def test_a_log_that_grows(kind: str, tmp_path: Path) -> None:
    """What the Trainer writes next can be read again, and holds the newest entries."""
    from safepoint.training.integrations.transformers.resume.trainer_log import trusted_history

    path = tmp_path / "trainer_state.json"
    deep = "[" * 100 + ",".join("0" * 100_000) + "]" * 100
    entries = {
        "deep": [f'{{"step": 1, "a": {deep}}}'] * 5,
        "long": [f'{{"step": 1, "é": "{"é" * 5_000_000}"}}'] * 5,
        "flat": ["{}"] * 1_500_000,
    }[kind]
    newest = '{"step": 4, "loss": 0.5}'
    log = ",".join([*entries, newest])
    path.write_text(f'{{"global_step": 4, "max_steps": 9, "train_batch_size": 8, "log_history": [{log}]}}')
    check_trainer_state(path, step=4)
    state = TrainerState.load_from_json(str(path))
    state.log_history = trusted_history(state.log_history, step=4)
    assert state.log_history[-1] == {"step": 4, "loss": 0.5}
    state.save_to_json(str(path))
    assert path.stat().st_size < 32 << 20
    check_trainer_state(path, step=4)


def test_a_long_log_is_kept(tmp_path: Path) -> None:
    from safepoint.training.integrations.transformers.resume.trainer_log import trusted_history

    history: list[dict[str, Any]] = [
        {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 1e-5, "epoch": 0.1, "step": step} for step in range(100_000)
    ]
    assert trusted_history(history, step=100_000) == history


@pytest.mark.parametrize("field", ["trial_params", "stateful_callbacks"])
def test_another_field_that_grows(field: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    deep = "[" * 100 + ",".join("0" * 100_000) + "]" * 100
    value = '{"A": {"attributes": {"a": DEEP}}}'.replace("DEEP", deep)
    path.write_text(f'{{"global_step": 4, "max_steps": 9, "train_batch_size": 8, "{field}": {value}}}')
    with pytest.raises(CheckpointError, match="without its log, it would have more than 8,388,608 bytes"):
        check_trainer_state(path, step=4)


# ---- settings and counters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", [1], {}])
def test_counters_of_a_callback(value: Any) -> None:
    callback = EarlyStoppingCallback(early_stopping_patience=3)
    saved = {"EarlyStoppingCallback": {"attributes": {"early_stopping_patience_counter": value}}}
    trainer = SimpleNamespace(
        args=SimpleNamespace(restore_callback_states_from_checkpoint=False),
        state=SimpleNamespace(stateful_callbacks=saved),
        callback_handler=SimpleNamespace(callbacks=[callback]),
        control=TrainerControl(),
    )
    with pytest.raises(ValueError, match="early_stopping_patience_counter"):
        restore_callbacks(trainer)


class Online:
    """As a trainer of TRL."""

    __module__ = "trl.trainer.sft_trainer"

    def __init__(self) -> None:
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.model = torch.nn.Linear(2, 2)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0
        self._step = 0


_FIGURES: dict[str, Any] = {
    "_metrics": {
        "a name that JSON cannot sort": {"train": {5: [1.0]}, "eval": {}},
        "a text": {"train": {"a": ["x"]}, "eval": {}},
        "a huge number": {"train": {"a": [_HUGE]}, "eval": {}},
        "no entry": {},
        "a list": {"train": [], "eval": []},
        "a number": 5,
        "an entry of another name": {"train": {}, "eval": {}, 5: {}},
        "a tensor": {"train": {"a": [torch.ones(2)]}, "eval": {}},
    },
    "_total_train_tokens": {"a text": "x", "a huge number": _HUGE, "a list": [1]},
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in _FIGURES.items() for kind in kinds])
def test_figures_of_trl(name: str, kind: str) -> None:
    """TRL adds their averages to the log, and each save writes the log."""
    with pytest.raises(ValueError, match=name):
        TrainerCounters(figures={name: _FIGURES[name][kind]}).restore(Online())


@pytest.mark.parametrize("value", ["x", -1, 1.5, None, 1 << 60])
def test_micro_batches_of_trl(value: Any) -> None:
    with pytest.raises(ValueError, match="_step"):
        TrainerCounters(cycle={"_step": value}).restore(Online())


def test_figures_that_trl_has_counted() -> None:
    trainer = Online()
    metrics = {"train": {"kl": [1.0, 2], "tensor": [torch.ones(())], "flag": [True]}, "eval": {}}
    TrainerCounters(figures={"_metrics": metrics, "_total_train_tokens": 7.0}, cycle={"_step": 4}).restore(trainer)
    assert trainer._metrics["train"]["kl"] == [1.0, 2]
    assert trainer._metrics["train"]["new"] == []
    assert (trainer._total_train_tokens, trainer._step) == (7.0, 4)


@pytest.mark.parametrize(
    "metrics",
    [{"a": "x"}, {"a": {}}, {"a": torch.ones(2)}, {"a": torch.ones(1, device="meta")}, {5: torch.ones(1)}, ["a"]],
)
def test_metrics_of_lightning(metrics: Any) -> None:
    from safepoint.training.integrations.lightning.callback import _checked_metrics

    with pytest.raises(ValueError, match="metric"):
        _checked_metrics(metrics)
    assert list(_checked_metrics({"a": torch.ones(())})) == ["a"]


@pytest.mark.parametrize("value", ["x", -1, 10**30, 1.5, True, None])
def test_counts_of_lightning(value: Any) -> None:
    from safepoint.training.integrations.lightning.loop_counts import check_counts

    good = {
        "fit_loop": {"state_dict": {"a": "b"}, "epoch_progress": {"total": {"ready": 5}, "current": {"ready": 1}}}
    }
    check_counts(good)
    for part in ("total", "current"):
        with pytest.raises(ValueError, match="count of a loop"):
            check_counts({**good, "val_loop": [{}, 5], "epoch_loop": {"progress": {part: {"completed": value}}}})


@pytest.mark.parametrize("value", ["x", -1, 10**30, None])
def test_the_step_of_accelerate(value: Any, tmp_path: Path) -> None:
    """The next micro-batch adds one to it."""
    from safepoint.training.plain.state.accelerated_parts import AcceleratedParts

    parts: Any = object.__new__(AcceleratedParts)
    parts._accelerator = SimpleNamespace(step=value)
    with pytest.raises(CheckpointError, match="micro-batches"):
        parts._check_step(tmp_path, 3)
    assert parts._accelerator.step == 3
    parts._check_step(tmp_path, 0)


def test_a_rank_without_a_state(tmp_path: Path) -> None:
    """The manifest says that more ranks wrote the checkpoint than have left a state."""
    from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState

    loss = LossTotals(since_log=1.0, total=1.0, last_logged_step=0, first_step=0)
    RankState(loss=loss, pending=DeferredWork(), epoch_rng={}, elapsed_s=0.0).write(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"safepoint_state_1\.pt"):
        RankState.read(tmp_path, rank=0, ranks_before=1 << 62, world_size=1)


def test_samples_without_end() -> None:
    """A manifest may state numbers of which the products are larger than any number in a manifest."""
    from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry

    for num_samples in (None, 1 << 40):
        geometry = BatchGeometry(
            world_size=1, accumulation=1, global_batch=1 << 62, num_samples=num_samples, drop_last=False
        )
        for is_regular in (True, False):
            seen = geometry.samples_seen(step=1 << 55, epoch=1e18, regular=is_regular)
            assert seen <= MAX_SAMPLES


# ---- whole runs --------------------------------------------------------------------------------------------------

_LIGHTNING = [str(TINY.parent / "lightning_loop.py"), "--step-ms", "1", "--save-steps", "2", "--epochs"]
_TINY = [str(TINY), "--samples", "64", "--eval-strategy", "steps", "--eval-steps", "2", "--max-steps"]


def _of_later_steps(state: Any) -> Any:
    later = [{"step": step, "eval_loss": -5.0, "eval_other": 1.0} for step in range(3, 9)]
    return {**state, "log_history": [*state["log_history"], *later]}


def _with_another_best(state: Any) -> Any:
    """A step after which no folder can be named: its name would be too long."""
    return {**state, "best_global_step": 10**300, "best_metric": -5.0, "best_model_checkpoint": None}


def _without_control(state: Any) -> Any:
    return {**state, "stateful_callbacks": {}}


def _with_settings(state: Any) -> Any:
    return {**state, "generation": {**state["generation"], "temperature": -5.0}}


def _with_metrics(state: Any) -> Any:
    for name, of_callback in state["callbacks"].items():
        if "Safepoint" in name:
            of_callback["metrics"]["other"] = "x"
    return state


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "counts", "file", "change", "code"),
    [
        (_TINY, ("2", "4"), "trainer_state.json", _of_later_steps, ExitCode.OK),
        (_TINY, ("2", "4"), "trainer_state.json", _with_another_best, ExitCode.OK),
        (_TINY, ("2", "4"), "trainer_state.json", _without_control, ExitCode.OK),
        (_TINY, ("2", "4"), "safepoint_state_0.pt", _with_settings, ExitCode.OK),
        (_LIGHTNING, ("1", "2"), "lightning.ckpt", _with_metrics, ExitCode.NOTHING_VALID),
    ],
)
def test_runs(
    program: list[str],
    counts: tuple[str, str],
    file: str,
    change: Callable[[Any], Any],
    code: ExitCode,
    tmp_path: Path,
) -> None:
    """They save what they train, or they do not train."""
    output = tmp_path / "run"

    def start(count: str) -> Any:
        words = [program[0], "--out", str(output), *program[1:], count]
        return safepoint(
            output, "--max-restarts", "0", "--save-strategy", "steps", "--save-steps", "2", program=words
        )

    job = start(counts[0])
    with no_orphans(job):
        assert job.wait() == ExitCode.OK, job.text
    path = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])) / file
    if path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        torch.save(change(torch.load(path, weights_only=False)), path)
    reseal(path.parent)
    job = start(counts[1])
    with no_orphans(job):
        assert job.wait() == code, job.text
    if code == ExitCode.OK:
        metrics = json.loads((output / "checkpoint-4" / "safepoint-manifest.json").read_bytes())["metrics"]
        assert metrics["eval_loss"] > 0
        assert "eval_other" not in metrics
    else:
        assert path.name in job.text or path.parent.name in job.text
