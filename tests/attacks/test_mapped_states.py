"""A file of a checkpoint is overwritten or truncated after it was verified and loaded.

Tensors that are mapped from the file would get the new content, which no digest covers. A truncated file would end
the process with SIGBUS.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from safepoint.checkpoint.pickles.module_states import only_copies, unmapped
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import only_data

_SIZE = 64


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(_SIZE, _SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, _SIZE)).sum().backward()
    optimizer.step()
    return model, optimizer


def fresh() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(_SIZE, _SIZE)
    return model, torch.optim.AdamW(model.parameters())


def overwrite(path: Path) -> None:
    """In place, so that a mapping shows it."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes(path.stat().st_size), 0)
    os.close(descriptor)


def _in_checkpointer(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    load_state(folder, {"model": model, "optimizer": optimizer})


def _in_session(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    NamedParts({"model": model, "optimizer": optimizer}, Place()).load(folder)


def _in_lightning(folder: Path, model: torch.nn.Module, optimizer: Any) -> None:
    pytest.importorskip("lightning")
    from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO, LightningParts

    connector = SimpleNamespace(_loaded_checkpoint={"optimizer_states": [{}], "lr_schedulers": []})
    trainer = SimpleNamespace(
        lr_scheduler_configs=[], optimizers=[optimizer], lightning_module=model, _checkpoint_connector=connector
    )

    def restore() -> None:
        for name, part in (("model", model), ("optimizer", optimizer)):
            part.load_state_dict(DirectCheckpointIO(is_mapped=True).load_checkpoint(folder / f"{name}.pt"))

    LightningParts(trainer, Place()).restore_states(folder, restore)


@pytest.mark.parametrize("load", [_in_checkpointer, _in_session, _in_lightning])
def test_what_is_kept(load: Any, tmp_path: Path) -> None:
    model, optimizer = stepped()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other, resumed = fresh()
    load(tmp_path, other, resumed)
    for path in tmp_path.iterdir():
        overwrite(path)
    for one, same in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_a_dictionary(tmp_path: Path) -> None:
    torch.save({"average": torch.ones(10_000)}, tmp_path / "extra.pt")
    extra: dict[str, Any] = {}
    load_state(tmp_path, {"extra": extra})
    overwrite(tmp_path / "extra.pt")
    assert extra["average"].sum() == 10_000


class Extra(torch.nn.Module):
    """Keeps what it loads, as a module with a state of its own may do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.extra = torch.zeros(10_000)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Own(Extra):
    """Keeps it in the method that torch calls for each module."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}extra"] = self.extra

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.extra = state_dict.pop(f"{prefix}extra")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hook(Extra):
    """Keeps it in a hook."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=module.extra))
        self.register_load_state_dict_pre_hook(self._keep)

    def _keep(self, module: Any, state: Any, *_: Any) -> None:
        self.extra = state.pop("extra")


def _of_a_framework(folder: Path, loaded: torch.nn.Module) -> None:
    """The Trainer and Accelerate load files of safetensors, which are mapped."""
    save_file(
        {name: one.detach() for name, one in torch.load(folder / "model.pt").items()}, folder / "model.safetensors"
    )
    with only_data(folder):
        loaded.load_state_dict(load_file(folder / "model.safetensors"), strict=False)


@pytest.mark.parametrize("way", ["checkpointer", "session", "framework"])
@pytest.mark.parametrize("kind", [Extra, Own, Hook])
def test_what_a_module_keeps(kind: type[Extra], way: str, tmp_path: Path) -> None:
    saved, loaded = kind(), kind()
    saved.extra = torch.ones(10_000)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    if way == "checkpointer":
        load_state(tmp_path, {"model": loaded})
    elif way == "session":
        NamedParts({"model": loaded}, Place()).load(tmp_path)
    else:
        _of_a_framework(tmp_path, loaded)
    for path in tmp_path.iterdir():
        overwrite(path)
    assert loaded.extra.sum() == 10_000


def test_modules_of_torch_only_copy() -> None:
    """Their states are not copied before, so that a model of any size is loaded in little memory."""
    layers = torch.nn.TransformerEncoderLayer(8, 2), torch.nn.BatchNorm1d(2), torch.nn.Embedding(2, 2)
    assert only_copies(torch.nn.ModuleList(layers))
    assert not any(only_copies(torch.nn.Sequential(kind())) for kind in (Extra, Own, Hook))


def test_parameters_that_are_replaced(tmp_path: Path) -> None:
    """With `assign=True`, the loaded tensors become the parameters."""
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    loaded = torch.nn.Linear(2, 2, bias=False)
    with only_data(tmp_path):
        loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    overwrite(tmp_path / "model.safetensors")
    assert loaded.weight.sum() == 4


def test_copies_of_a_state() -> None:
    """They keep the versions of the modules, and what is no tensor."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    state["extra"] = {"tensors": [torch.ones(2)], "text": "x"}
    copied = unmapped(state)
    assert copied._metadata == state._metadata
    assert list(copied) == list(state)
    assert copied["extra"]["text"] == "x"
    assert copied["extra"]["tensors"][0].data_ptr() != state["extra"]["tensors"][0].data_ptr()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_hooks_of_lightning_keep(tmp_path: Path, is_mapped: bool) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from safepoint.training.integrations.lightning.lightning_parts import STATE, LightningParts

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    class Averaged(Plain):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.average = checkpoint["state_dict"]["layer.weight"]

    module = Plain() if is_mapped else Averaged()
    torch.save({"state_dict": {"layer.weight": torch.ones(2, 2)}, "average": torch.ones(9000)}, tmp_path / STATE)
    found: dict[str, Any] = {}
    strategy = SimpleNamespace(checkpoint_io=None)
    connector = SimpleNamespace(_loaded_checkpoint=found)
    trainer: Any = SimpleNamespace(
        lightning_module=module, callbacks=[], strategy=strategy, _checkpoint_connector=connector
    )

    def restore(path: Path, weights_only: bool | None) -> None:
        found.update(trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only))

    LightningParts(trainer, Place()).restore(tmp_path, None, restore)
    overwrite(tmp_path / STATE)
    assert found["average"].sum() == 9000
    assert bool(found["state_dict"]["layer.weight"].any()) is not is_mapped
