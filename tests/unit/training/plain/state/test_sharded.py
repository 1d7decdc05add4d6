"""A sharded module of a session through its files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safepoint.checkpoint.tools.export import export_pieces
from safepoint.foundation.environment import Place
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import parse_location
from safepoint.training.plain.state.parts import NamedParts

pytestmark = pytest.mark.usefixtures("group")


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(30, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def keys_of(folder: Path) -> set[str]:
    return set(FileSystemReader(str(folder / "sharded")).read_metadata().state_dict_metadata)


def test_the_final_model_has_no_optimizer(tmp_path: Path) -> None:
    """A checkpoint has the states of the optimizer; the final model has the weights alone, and can be exported."""
    from safetensors.torch import load_file

    parts = trained()
    named = NamedParts(parts, Place())
    checkpoint, final = tmp_path / "checkpoint", tmp_path / "final"
    checkpoint.mkdir()
    final.mkdir()
    named.write(checkpoint)
    named.write_final(final)
    assert any(key.startswith("optimizer.state.") for key in keys_of(checkpoint))
    assert keys_of(final) == {"model.weight", "model.bias"}
    export_pieces(LocalStore(parse_location(str(final))), "", parse_location(str(tmp_path / "exported")))
    [file] = (tmp_path / "exported").glob("*.safetensors")
    weights = load_file(file)
    for name, tensor in parts["model"].state_dict().items():
        assert torch.equal(weights[name], tensor.full_tensor()), name
