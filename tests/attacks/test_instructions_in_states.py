"""States of modules that say how they are to be loaded: torch follows them.

With one entry, `load_state_dict` puts the loaded tensors into the place of the parameters. Each tensor has the right
shape, but it may be expanded from one element, and the fused kernels of optimizers write to the memory behind it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.foundation.environment import Place
from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import load_data, only_data


def _hostile(module: torch.nn.Module) -> Any:
    state: Any = module.state_dict()
    for version in state._metadata.values():
        version["assign_to_params_buffers"] = True
    for name, tensor in list(state.items()):
        state[name] = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return state


def _as_trainer(path: Path) -> Any:
    with only_data(path.parent):
        return torch.load(path, map_location="cpu", weights_only=True)


def _as_lightning(path: Path) -> Any:
    return DirectCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("load", [load_data, _as_trainer, _as_lightning])
def test_the_memory_of_parameters(load: Any, is_inside: bool, tmp_path: Path) -> None:
    """A checkpoint of Lightning has the state of the model below a key."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.BatchNorm1d(20))
    path = tmp_path / "model.pt"
    torch.save({"state_dict": _hostile(model)} if is_inside else _hostile(model), path)
    own: dict[str, torch.Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
    loaded = load(path)
    model.load_state_dict(loaded["state_dict"] if is_inside else loaded)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor is own[name]
        assert tensor.is_contiguous()
        assert (tensor == 1).all()


def test_a_session_trains_the_parameters_of_its_model(tmp_path: Path) -> None:
    """Its optimizer was made before the checkpoint was loaded."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.save(_hostile(model), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    NamedParts({"model": model, "optimizer": optimizer}, Place()).load(tmp_path)
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_versions_are_kept(tmp_path: Path) -> None:
    """Modules change the states of their earlier versions, so they need the number."""
    state: Any = torch.nn.BatchNorm1d(3).state_dict()
    torch.save(state, tmp_path / "model.pt")
    assert load_data(tmp_path / "model.pt")._metadata == state._metadata == {"": {"version": 2}}
