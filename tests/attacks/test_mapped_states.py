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

from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts

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

    trainer = SimpleNamespace(lr_scheduler_configs=[], optimizers=[optimizer], lightning_module=model)

    def restore() -> None:
        for name, part in (("model", model), ("optimizer", optimizer)):
            part.load_state_dict(DirectCheckpointIO().load_checkpoint(folder / f"{name}.pt"))

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
