"""Training states that set other attributes than those that were saved, or add parts that the script has not made."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from safepoint.errors import CheckpointError, ConflictError
from safepoint.training.integrations.transformers.resume import loaded_model
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters, restore_callbacks
from safepoint.training.integrations.transformers.resume.loaded_model import (
    complete_load,
    load_later_adapters,
    only_own_adapters,
)
from safepoint.training.integrations.transformers.resume.state_fields import check_trainer_state
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState


class Online:
    """As a trainer of TRL."""

    __module__ = "trl.trainer.online_trainer"

    def __init__(self) -> None:
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.model = torch.nn.Linear(2, 2)
        self.hub_model_id = "mine/model"
        self._metrics = {"train": {"loss": [1.0]}}


@pytest.mark.parametrize("part", ["figures", "cycle"])
def test_attributes_of_a_trainer(part: str) -> None:
    trainer = Online()
    hostile: Any = {"hub_model_id": "theirs/model", "save_model": 5, "args": {}, "model": None}
    TrainerCounters(**{part: hostile}).restore(trainer)
    assert trainer.hub_model_id == "mine/model"
    assert "save_model" not in vars(trainer)
    assert isinstance(trainer.args, SimpleNamespace)


def test_attributes_of_a_callback() -> None:
    from transformers import EarlyStoppingCallback

    callback = EarlyStoppingCallback(early_stopping_patience=3)
    attributes = {"early_stopping_patience_counter": 2, "on_step_end": "x", "early_stopping_patience": 7}
    trainer = SimpleNamespace(
        args=SimpleNamespace(restore_callback_states_from_checkpoint=False),
        state=SimpleNamespace(stateful_callbacks={"EarlyStoppingCallback": {"attributes": attributes}}),
        callback_handler=SimpleNamespace(callbacks=[callback]),
        control=SimpleNamespace(),
    )
    restore_callbacks(trainer)
    assert callback.early_stopping_patience_counter == 2
    assert callback.early_stopping_patience == 3
    assert callable(callback.on_step_end)


_GOOD = RankState(
    loss=LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0),
    pending=DeferredWork(),
    epoch_rng={},
    elapsed_s=0.0,
)


@pytest.mark.parametrize("content", [{}, {"loss": 5}, [1], {"loss": {"a": 1}}, {"pending": {"b": 2}}, 7])
def test_a_state_of_another_shape(content: Any, tmp_path: Path) -> None:
    """A message, and no traceback."""
    _GOOD.write(tmp_path, 0)
    path = tmp_path / "safepoint_state_0.pt"
    if isinstance(content, dict) and content:
        content = {**torch.load(path, weights_only=False), **content}
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="is not the state of a rank"):
        RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)


@pytest.mark.parametrize(
    "content", ['{"global_step": 1000000000}', "{}", "5", '{"a":' * 60_000, '{"global_step": "4"}']
)
def test_a_state_of_another_step(content: str, tmp_path: Path) -> None:
    """The training would end at once, and commit a checkpoint of that step."""
    (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json (is damaged|says step)"):
        check_trainer_state(tmp_path / "trainer_state.json", step=4)
    (tmp_path / "trainer_state.json").write_text(
        '{"global_step": 4, "train_batch_size": 8, "log_history": [{"loss": NaN}]}'
    )
    check_trainer_state(tmp_path / "trainer_state.json", step=4)


@pytest.mark.parametrize(
    "name", ["reset", "increment_ready", "load_state_dict", "state_dict", "__class__", "other", 5]
)
def test_a_count_that_hides_a_method(name: Any) -> None:
    """Lightning makes an attribute of each entry, on the object whose methods it calls."""
    pytest.importorskip("lightning")
    from safepoint.training.integrations.lightning.loop_counts import check_counts

    counts = {"ready": 4, "completed": 4, "started": 4, "processed": 4}
    for saved, is_good in ((counts, True), ({**counts, name: 5}, False)):
        progress = {"total": counts, "current": saved, "is_last_batch": False}
        loops = {"fit_loop": {"epoch_progress": progress, "epoch_loop.state_dict": {"_batches_that_stepped": 4}}}
        if is_good:
            check_counts(loops)
        else:
            with pytest.raises(ValueError, match="has an unknown count"):
                check_counts(loops)


# ---- adapters and configurations -------------------------------------------------------------------------------


def _adapter(folder: Path, **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))


@pytest.mark.parametrize("mine", [["default"], ["policy"], ["default", "policy"]])
def test_an_adapter_that_the_model_lacks(mine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer would add it, and PEFT would import what its settings name, and search with their patterns."""
    monkeypatch.setattr(loaded_model, "_exactly", lambda *_: contextlib.nullcontext())  # these files have no weights
    model = SimpleNamespace(peft_config={name: SimpleNamespace(to_dict=dict) for name in mine})
    for name in mine:
        _adapter(tmp_path if name == "default" else tmp_path / name)
    load_later_adapters(model, mine, tmp_path, step=3)
    _adapter(tmp_path / "theirs", megatron_config={"a": 1}, megatron_core="megatron.theirs", target_modules="(.*)*X")
    called: list[str] = []
    model.load_adapter = lambda path, name: called.append(name)
    with only_own_adapters(model):
        for name in [*mine, "theirs"]:
            model.load_adapter(tmp_path, name)
    assert called == mine
    with pytest.raises(ConflictError, match="has an adapter theirs"):
        load_later_adapters(model, mine, tmp_path, step=3)


def test_an_adapter_without_a_name(tmp_path: Path) -> None:
    """Beside an adapter of the script, it would be added under the name `default`."""
    model = SimpleNamespace(peft_config={"policy": SimpleNamespace(to_dict=dict)})
    _adapter(tmp_path)
    load_later_adapters(model, ["policy"], tmp_path, step=3)  # the Trainer loads it into the model's own one
    _adapter(tmp_path / "policy")
    with pytest.raises(ConflictError, match="has an adapter default"):
        load_later_adapters(model, ["policy"], tmp_path, step=3)


def test_the_configuration_of_the_checkpoint_is_not_used(tmp_path: Path) -> None:
    """It names what `from_pretrained` loads: a quantization, code for attention, or the base of an adapter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**cast("Any", sizes), num_key_value_heads=2, num_local_experts=2, vocab_size=16)
    model: Any = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    missing = [name for name, _ in model.named_parameters() if "experts" in name]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = json.loads((tmp_path / "config.json").read_text())
    hostile = {
        **saved,
        "attn_implementation": "theirs/kernel",
        "quantization_config": {"quant_method": "bitsandbytes"},
    }
    (tmp_path / "config.json").write_text(json.dumps(hostile))
    for name in missing:
        model.get_parameter(name).data.zero_()
    complete_load(model, missing, tmp_path, step=3)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "theirs/model"}))
    with pytest.raises(ConflictError, match="lacks the model's weight"):
        complete_load(model, missing, tmp_path, step=3)


# ---- functions of schedulers -----------------------------------------------------------------------------------


class Warm:
    """A function of a script that computes learning rates."""

    def __init__(self) -> None:
        self.factors = [0.5, 1.0]
        self.steps = 3

    def __call__(self, step: int) -> float:
        return self.factor(step)

    def factor(self, step: int) -> float:
        return self.factors[min(step, 1)]


_ATTRIBUTES: list[dict[Any, Any]] = [{"factor": 5}, {"path": "/etc/passwd"}, {"steps": "x"}, {5: 1}]


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("attributes", _ATTRIBUTES)
def test_attributes_of_the_function_of_a_scheduler(attributes: dict[Any, Any], is_inner: bool) -> None:
    """torch sets each of them on the script's object, also those that hide a method."""
    from torch.optim import lr_scheduler

    from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    function = Warm()
    scheduler: Any = lr_scheduler.LambdaLR(optimizer, function)
    if is_inner:
        scheduler = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), scheduler], [1])
    state = scheduler.state_dict()
    inner = state["_schedulers"][1] if is_inner else state
    for saved, is_good in (({"factors": [0.25, 1.0], "steps": 4}, True), (attributes, False)):
        inner["lr_lambdas"] = [saved]
        with checked_schedulers("scheduler.pt", scheduler):
            if is_good:
                scheduler.load_state_dict(state)
            else:
                with pytest.raises(CheckpointError, match="_schedulers" if is_inner else "lr_lambdas"):
                    scheduler.load_state_dict(state)
    assert vars(function) == {"factors": [0.25, 1.0], "steps": 4}


def test_the_function_of_a_scheduler_without_attributes() -> None:
    from torch.optim import lr_scheduler

    from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers

    scheduler = lr_scheduler.LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), lambda step: 1.0)
    for saved in ([None], [{}], [{"__wrapped__": 5}], [None, None]):
        state = {**scheduler.state_dict(), "lr_lambdas": saved}
        with checked_schedulers("scheduler.pt", scheduler):
            if saved in ([None], [{}]):
                scheduler.load_state_dict(state)
            else:
                with pytest.raises(CheckpointError, match="lr_lambdas"):
                    scheduler.load_state_dict(state)
