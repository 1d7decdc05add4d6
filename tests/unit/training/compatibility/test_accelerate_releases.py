"""What Accelerate's releases load of a model under FSDP: the gaps are found by the code that is there."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.fsdp_utils as library
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from safepoint.training.compatibility.accelerate_releases import complete_fsdp

_FUNCTIONS = ("load_fsdp_optimizer", "_get_model_state_dict", "_set_model_state_dict")


@pytest.fixture
def trainer_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that has imported Accelerate's function, in the place of the Trainer's; everything is put back."""
    for name in _FUNCTIONS:
        monkeypatch.setattr(library, name, getattr(library, name))
    monkeypatch.delitem(sys.modules, "accelerate.utils", raising=False)
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    module = SimpleNamespace(load_fsdp_optimizer=library.load_fsdp_optimizer)
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    return module


def _plugin(version: int, state: str) -> Any:
    return SimpleNamespace(fsdp_version=version, state_dict_type=f"StateDictType.{state}")


def test_every_importer_gets_the_function_once(trainer_module: Any) -> None:
    """A second call wraps nothing again."""
    complete_fsdp()
    first = library.load_fsdp_optimizer
    assert trainer_module.load_fsdp_optimizer is first
    complete_fsdp()
    assert library.load_fsdp_optimizer is first
    assert trainer_module.load_fsdp_optimizer is first


@pytest.mark.parametrize(
    ("version", "state", "options"),
    [(1, "FULL_STATE_DICT", {}), (2, "FULL_STATE_DICT", {}), (1, "SHARDED_STATE_DICT", {"use_dcp": False})],
)
def test_what_accelerate_loads_is_left_to_it(
    version: int, state: str, options: dict[str, Any], trainer_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole states, and files that DCP does not read."""
    calls: list[tuple[Any, ...]] = []

    def load(plugin: Any, accelerator: Any, optimizer: Any, model: Any, folder: Any, index: int, **_: Any) -> None:
        calls.append((optimizer, model, folder, index))

    monkeypatch.setattr(library, "load_fsdp_optimizer", load)
    complete_fsdp()
    library.load_fsdp_optimizer(_plugin(version, state), None, "optimizer", "model", "folder", **options)
    assert calls == [("optimizer", "model", "folder", 0)]


def test_shards_are_left_to_a_release_that_loads_them(trainer_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function creates the entries of a new optimizer's state, which is seen in its code."""
    calls: list[str] = []

    def newer(*_: Any, **__: Any) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        calls.append(get_optimizer_state_dict.__name__)

    monkeypatch.setattr(library, "load_fsdp_optimizer", newer)
    complete_fsdp()
    library.load_fsdp_optimizer(_plugin(2, "SHARDED_STATE_DICT"), None, None, None, "folder")
    assert calls == ["get_optimizer_state_dict"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("version", [1, 2])
def test_shards_are_loaded_where_a_release_would_not(
    version: int, trainer_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new optimizer gets the moments and the steps of the saved one."""
    monkeypatch.setattr(library, "load_fsdp_optimizer", lambda *_, **__: None)
    complete_fsdp()
    model, saved = _trained(3)
    checkpoint.save({"optimizer": get_optimizer_state_dict(model, saved)}, checkpoint_id=tmp_path / "optimizer_0")
    model, loaded = _trained(0)
    waits = SimpleNamespace(wait_for_everyone=lambda: None)
    wrapped = SimpleNamespace(optimizer=loaded)
    library.load_fsdp_optimizer(_plugin(version, "SHARDED_STATE_DICT"), waits, wrapped, model, tmp_path)
    ours, theirs = (list(one.state.values()) for one in (loaded, saved))
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in other)


def _trained(num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_older_releases_get_whole_states_of_adapters(trainer_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other states are left to Accelerate's functions."""

    def read(model: Any, adapter_only: bool = False, sd_options: Any = None) -> str:
        return "accelerate"

    def write(model: Any, state_dict: Any, adapter_only: bool = False, sd_options: Any = None) -> str:
        return "accelerate"

    monkeypatch.setattr(library, "_get_model_state_dict", read)
    monkeypatch.setattr(library, "_set_model_state_dict", write)
    complete_fsdp()
    whole, shards = (SimpleNamespace(full_state_dict=is_full) for is_full in (True, False))
    monkeypatch.setattr(library, "is_peft_model", lambda _: True)
    for options, adapter_only in ((None, True), (shards, True), (whole, False)):
        assert library._get_model_state_dict(None, adapter_only=adapter_only, sd_options=options) == "accelerate"
        assert library._set_model_state_dict(None, {}, adapter_only=adapter_only, sd_options=options) == "accelerate"
