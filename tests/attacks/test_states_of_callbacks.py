"""States of callbacks with the Trainer's own option, which makes each callback again from the checkpoint.

The Trainer checks neither the arguments nor the attributes, and does not ask whether a callback saves a state at all.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DefaultFlowCallback, EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume


class Writes(TrainerCallback, ExportableState):
    """A callback of a script."""

    def __init__(self, path: str = "", lines: int = 3) -> None:
        self.path, self.lines, self.count = path, lines, 0

    def state(self) -> dict[str, Any]:
        return {"args": {"path": self.path, "lines": self.lines}, "attributes": {"count": self.count}}


def _restored(states: dict[str, Any], *callbacks: Any) -> Any:
    """A trainer after `_load_callback_state`, as a resume calls it."""
    handler: Any = CallbackHandler([*callbacks, DefaultFlowCallback()], None, None, None, None)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(restore_callback_states_from_checkpoint=True),
        state=SimpleNamespace(stateful_callbacks=states),
        callback_handler=handler,
        control=TrainerControl(),
    )
    resume: Any = object.__new__(TrainerResume)
    resume._trainer, resume._point = trainer, SimpleNamespace(path=Path("checkpoint-4"))
    resume._load_callbacks(lambda: Trainer._load_callback_state(trainer))
    return trainer


def _of(trainer: Any, kind: Any) -> Any:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, kind))


def test_a_path_among_the_arguments() -> None:
    """The callback would write there."""
    for path in ("/home/someone/.bashrc", None, 5):
        with pytest.raises(CheckpointError, match="could not be loaded: ValueError: path of Writes"):
            _restored({"Writes": {"args": {"path": path}}}, Writes("lines.txt"))


@pytest.mark.parametrize("name", ["path", "on_save", "__class__", "other"])
def test_an_attribute_that_is_not_saved(name: str) -> None:
    state = {"args": {"path": "lines.txt"}, "attributes": {name: "x", "count": 7}}
    found = _of(_restored({"Writes": state}, Writes("lines.txt")), Writes)
    assert (found.path, found.count) == ("lines.txt", 7)
    assert callable(found.on_save)
    assert not hasattr(found, "other")


def test_a_value_of_another_kind() -> None:
    for part in ("args", "attributes"):
        state = {part: {"lines": "x", "count": [5]}}
        with pytest.raises(CheckpointError, match="of Writes is"):
            _restored({"Writes": state}, Writes())


@pytest.mark.parametrize("is_list", [False, True])
def test_callbacks_that_save_nothing(is_list: bool) -> None:
    """Without their methods, each start of the run would end with a TypeError."""
    state: Any = {"args": {"context": 5}, "attributes": {"on_step_end": 7}}
    trainer = _restored({"DefaultFlowCallback": [state] if is_list else state}, Writes())
    assert callable(_of(trainer, DefaultFlowCallback).on_step_end)


def test_two_callbacks_of_a_class() -> None:
    states = [{"attributes": {"count": count, "path": "/etc/passwd"}} for count in (4, 5, 6)]
    trainer = _restored({"Writes": states}, Writes(), Writes())
    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, Writes)]
    assert [(one.count, one.path) for one in found] == [(4, ""), (5, "")]


def test_states_that_a_trainer_has_saved() -> None:
    patience = EarlyStoppingCallback(5, 0.5)
    patience.early_stopping_patience_counter = 2
    states = {"EarlyStoppingCallback": patience.state(), "TrainerControl": TrainerControl(True).state(), "Gone": {}}
    trainer = _restored(states, EarlyStoppingCallback(3))
    found = _of(trainer, EarlyStoppingCallback)
    assert (found.early_stopping_patience, found.early_stopping_threshold) == (5, 0.5)
    assert found.early_stopping_patience_counter == 2
    assert trainer.control.should_training_stop


# ---- Lightning's own callbacks ----------------------------------------------------------------------------------


def _lightning(state: dict[str, Any], callback: Any, loaded: Any = None) -> Any:
    """Let a callback load its state with others, as a resume does."""
    from safepoint.training.integrations.lightning.lightning_parts import LightningParts

    parts: Any = LightningParts.__new__(LightningParts)
    connector = SimpleNamespace(_loaded_checkpoint=loaded or {})
    parts._trainer = SimpleNamespace(callbacks=[callback], _checkpoint_connector=connector)
    with states_of("lightning.ckpt"), parts._checked_callbacks():
        callback.load_state_dict({**callback.state_dict(), **state})
    assert "load_state_dict" not in vars(callback)
    return callback


@pytest.mark.parametrize(
    "state",
    [
        {"best_score": "x"}, {"best_score": torch.ones(5)}, {"best_score": 1.0}, {"patience": "x"},
        {"patience": 10**400}, {"wait_count": [1]}, {"stopped_epoch": torch.ones(())},
        {"best_score": torch.tensor(1 + 1j)}, {"best_score": torch.empty((), device="meta")},
        {"best_score": torch.ones(1).to(torch.float8_e5m2)}, {"best_score": torch.tensor(float("nan"))},
        {"wait_count": -1}, {"wait_count": float("nan")}, {"best_score": None},
    ],
)  # fmt: skip
def test_early_stopping(state: dict[str, Any]) -> None:
    """With such a value, a later epoch would raise an error that names no file, in each start."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    with pytest.raises(CheckpointError, match=r"lightning\.ckpt could not be loaded: .*EarlyStopping"):
        _lightning(state, callbacks.EarlyStopping("loss"))


@pytest.mark.parametrize(
    "elapsed",
    [
        {"train": None},
        {"test": None},
        {"train": "x"},
        {"train": None, "validate": [1]},
        "x",
        5,
        {"train": 1e300},
        {"train": -1.0},
    ],
)
def test_a_timer(elapsed: Any) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    with pytest.raises(CheckpointError, match="Timer"):
        _lightning({"time_elapsed": elapsed}, callbacks.Timer())


@pytest.mark.parametrize(
    "state",
    [
        {"best_model_score": "x"}, {"current_score": torch.ones(2)}, {"kth_value": 5},
        {"best_k_models": {}},
    ],
)  # fmt: skip
def test_scores_of_model_checkpoint(state: dict[str, Any], tmp_path: Path) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if "best_k_models" in state:
        state = {"best_k_models": {f"{tmp_path}/a.ckpt": "x"}}
    with pytest.raises(CheckpointError, match="ModelCheckpoint"):
        _lightning(state, callbacks.ModelCheckpoint(tmp_path, monitor="loss"))


def test_what_lightning_saves() -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    state = {"best_score": torch.tensor(0.5), "wait_count": 2, "patience": 4, "stopped_epoch": 0}
    found = _lightning(state, callbacks.EarlyStopping("loss")).state_dict()
    assert {name: found[name] for name in state} == {**state, "patience": 3}  # the script's setting
    assert _lightning({"time_elapsed": {"train": 5.0}}, callbacks.Timer())._offset == 5.0


_EVENTS = ("ready", "started", "processed", "completed")
_LOOPS = {
    "fit_loop": {
        "epoch_progress": {one: {"ready": 1, "processed": 1, "completed": 1} for one in ("total", "current")},
        "epoch_loop.batch_progress": {
            **{one: dict.fromkeys(_EVENTS, 4) for one in ("total", "current")},
            "is_last_batch": True,
        },
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": {"total": {"completed": 4}}}},
        "epoch_loop.manual_optimization.optim_step_progress": {"total": {"completed": 0}},
        "epoch_loop.state_dict": {"_batches_that_stepped": 4},
    }
}
"""The counts of loops after four steps and an epoch."""


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("StochasticWeightAveraging", {"n_averaged": -1}), ("StochasticWeightAveraging", {"n_averaged": 3}),
        ("StochasticWeightAveraging", {"n_averaged": 10**30}),
        ("StochasticWeightAveraging", {"scheduler_state": "x"}),
        ("StochasticWeightAveraging", {"scheduler_state": {}}),
        ("StochasticWeightAveraging", {"scheduler_state": {"last_epoch": 3}}),
        ("StochasticWeightAveraging", {"latest_update_epoch": 2}),
        ("EMAWeightAveraging", {"latest_update_step": 1 << 50}),
        ("EMAWeightAveraging", {"latest_update_step": float("nan")}),
        ("EMAWeightAveraging", {"latest_update_step": 6}),
        ("BackboneFinetuning", {"internal_optimizer_metadata": {0: 5}}),
        ("BackboneFinetuning", {"internal_optimizer_metadata": {0: [{"params": [5]}]}}),
        ("BackboneFinetuning", {"previous_backbone_lr": "x"}),
        ("BackboneFinetuning", {"previous_backbone_lr": float("nan")}),
    ],
)  # fmt: skip
def test_values_that_a_callback_uses_later(name: str, state: dict[str, Any]) -> None:
    """The run would fail in a later hook, in each start, or would train with another number of averages."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    made = getattr(callbacks, name)(**({"swa_lrs": 0.1} if name == "StochasticWeightAveraging" else {}))
    with pytest.raises(CheckpointError, match=rf"lightning\.ckpt could not be loaded: .*{name}"):
        _lightning(state, made, {"loops": _LOOPS})
    _lightning({}, made, {"loops": _LOOPS})


def test_the_best_models_of_model_checkpoint(tmp_path: Path) -> None:
    """ModelCheckpoint looks up the score of the worst of the best models."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    first, second = (f"{tmp_path}/{name}.ckpt" for name in "ab")
    best = {first: torch.tensor(0.1), second: torch.tensor(0.2)}
    for state in (
        {"best_k_models": [first]}, {"best_k_models": {first: torch.tensor(1j)}},
        {"best_k_models": best, "kth_best_model_path": f"{tmp_path}/c.ckpt"},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="ModelCheckpoint"):
            _lightning(state, callbacks.ModelCheckpoint(tmp_path, monitor="loss"))
    two = callbacks.ModelCheckpoint(tmp_path, monitor="loss", save_top_k=2)
    found = _lightning({"best_k_models": best, "kth_best_model_path": ""}, two)
    assert found.kth_best_model_path == second


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("most", [2, 0, -1])
def test_more_models_than_a_callback_keeps(most: int, mode: str, tmp_path: Path) -> None:
    """It would search all of them at each save, and write them into each checkpoint. A script may also keep fewer."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    best = {f"{tmp_path}/{number}.ckpt": torch.tensor(float(number)) for number in range(30_000)}
    best[f"{tmp_path}/nan.ckpt"] = torch.tensor(float("nan"))
    worst = f"{tmp_path}/{29_999 if mode == 'min' else 0}.ckpt"
    made = callbacks.ModelCheckpoint(tmp_path, monitor="loss", mode=mode, save_top_k=most)
    found = _lightning({"best_k_models": best, "kth_best_model_path": worst, "best_model_path": worst}, made)
    limit = 10_000 if most < 0 else most
    first = range(limit) if mode == "min" else range(29_999, 29_999 - limit, -1)
    assert set(found.best_k_models) == {f"{tmp_path}/{number}.ckpt" for number in first}
    if most == 2:
        assert found.kth_best_model_path == f"{tmp_path}/{first[-1]}.ckpt"
        assert float(found.kth_value) == first[-1]
    with pytest.raises(CheckpointError, match="is not one of its best models"):
        _lightning({"best_k_models": best, "kth_best_model_path": f"{tmp_path}/x.ckpt"}, made)


def test_a_table_of_a_callback_without_limits() -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from safepoint.training.integrations.lightning.callback_states import check_state

    made: Any = callbacks.Callback()
    made.state_dict = lambda: {"seen": {"a": 1}, "names": []}
    for table in ({"seen": dict.fromkeys(range(10_001), 0)}, {"names": [0] * 10_001}):
        with pytest.raises(ValueError, match="more than 10000 entries"):
            check_state(made, table, steps=1, epochs=1)


def test_a_scheduler_before_models_are_averaged() -> None:
    """Lightning would remove the scheduler of the script at once, and train without one."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from safepoint.training.integrations.lightning.callback_states import watch_later_loads

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    state = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1).state_dict()
    for latest, is_refused in ((1, True), (2, False)):
        made = callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=3)
        trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[object()], max_epochs=5)
        made.load_state_dict(
            {"n_averaged": 1, "latest_update_epoch": latest, "scheduler_state": state, "average_model_state": None}
        )
        with watch_later_loads("lightning.ckpt", [made], lambda: [optimizer]):
            if is_refused:
                with pytest.raises(CheckpointError, match="has averaged no model yet"):
                    made.on_fit_start(trainer, torch.nn.Linear(1, 1))
            else:
                made.on_fit_start(trainer, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("wrong", [{}, {"step": 5}, {"base_lrs": "x"}, {"_step_count": None}])
def test_the_scheduler_of_averages(wrong: dict[str, Any]) -> None:
    """It is made when the states are restored, in the middle of an epoch too, and the averages do not change."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from safepoint.training.integrations.lightning.averaged_weights import continue_averaging

    module = BoringModel()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1)
    optimizer.step()
    scheduler.step()
    state = {**scheduler.state_dict(), **wrong}
    made = callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=2)
    made._max_epochs, made._average_model = 5, BoringModel()
    averages: Any = {name: one.clone() for name, one in made._average_model.state_dict().items()}
    made.load_state_dict(
        {"n_averaged": 2, "latest_update_epoch": 2, "scheduler_state": state, "average_model_state": averages}
    )
    trainer: Any = SimpleNamespace(
        callbacks=[made], current_epoch=2, max_epochs=5, optimizers=[optimizer], lr_scheduler_configs=[]
    )
    trainer.lightning_module, lr = module, optimizer.param_groups[0]["lr"]
    if wrong:
        with pytest.raises(CheckpointError, match=r"lightning\.ckpt"):
            continue_averaging(trainer, "lightning.ckpt")
        return
    continue_averaging(trainer, "lightning.ckpt")
    [config] = trainer.lr_scheduler_configs
    saved = made.state_dict()
    assert (saved["n_averaged"], saved["latest_update_epoch"], made._max_epochs) == (2, 2, 5)
    assert (saved["scheduler_state"]["last_epoch"], optimizer.param_groups[0]["lr"]) == (1, lr)
    assert config.scheduler.state_dict() == saved["scheduler_state"]
    assert all(torch.equal(one, averages[name]) for name, one in saved["average_model_state"].items())


def test_a_check_in_on_fit_start() -> None:
    """An error of the state names the file; an error of the script stays as it is."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from safepoint.training.integrations.lightning.callback_states import watch_later_loads

    timer: Any = callbacks.Timer(duration={"hours": 1})
    timer._offset = None  # as a state of an unknown kind would set it
    averaging: Any = callbacks.StochasticWeightAveraging(0.1)
    with watch_later_loads("lightning.ckpt", [timer, averaging], list):
        with pytest.raises(CheckpointError, match=r"lightning\.ckpt could not be loaded: TypeError"):
            timer.on_fit_start(SimpleNamespace())
        with pytest.raises(MisconfigurationException, match="1 `optimizer`"):
            averaging.on_fit_start(SimpleNamespace(optimizers=[]), torch.nn.Linear(1, 1))


def test_groups_of_optimizers_that_do_not_exist() -> None:
    """The callback would write them into each checkpoint."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from safepoint.training.integrations.lightning.callback_states import watch_later_loads

    made: Any = callbacks.BackboneFinetuning()
    made.load_state_dict(
        {"internal_optimizer_metadata": {5: [], "x": "y" * 1000, None: 1}, "previous_backbone_lr": None}
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with watch_later_loads("lightning.ckpt", [made], lambda: [optimizer]):
        module: Any = torch.nn.Module()
        module.backbone = torch.nn.Linear(1, 1)
        made.on_fit_start(SimpleNamespace(optimizers=[optimizer]), module)
    assert made.state_dict()["internal_optimizer_metadata"] == {}


def test_groups_that_a_callback_puts_into_the_optimizer() -> None:
    """The settings that say how a step is computed stay those of the script, and no parameter is left out."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from safepoint.training.integrations.lightning.callback_states import watch_later_loads

    module: Any = torch.nn.ModuleDict({"backbone": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    module.backbone = module["backbone"]

    def start(*groups: dict[str, Any]) -> list[dict[str, Any]]:
        optimizer = torch.optim.AdamW(module["head"].parameters(), lr=0.5)
        made = callbacks.BackboneFinetuning()
        made.load_state_dict({"internal_optimizer_metadata": {0: list(groups)}, "previous_backbone_lr": None})
        with watch_later_loads("lightning.ckpt", [made], lambda: [optimizer]):
            made.on_fit_start(SimpleNamespace(optimizers=[optimizer]), module)
        return optimizer.param_groups

    hostile: dict[str, Any] = {**torch.optim.AdamW(module.parameters(), lr=0.25).param_groups[0], "maximize": True}
    hostile |= {"fused": True, "capturable": True}
    head, backbone = ({"params": [f"{one}.weight", f"{one}.bias"]} for one in ("head", "backbone"))
    found = start(hostile | head, hostile | backbone)
    assert [(one["lr"], one["maximize"], one["fused"], one["capturable"]) for one in found] == [
        (0.25, False, None, False)
    ] * 2
    for groups in (
        [hostile | backbone], [hostile | head, hostile | head], [hostile | head | {"lr": "x"}],
        [hostile | {"params": ["nothing.weight"]}],
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"lightning\.ckpt"):
            start(*groups)


class Own:
    """A callback of the script, whose state may be of any kind."""

    seen: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_callback_of_the_script() -> None:
    pytest.importorskip("lightning")
    assert _lightning({"seen": "x"}, Own()).seen == "x"
