"""Weights in folders of torch.distributed.checkpoint, as anybody writes them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.checkpoint.weights.stored_weight import gather
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import browse
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.randn(5, 7),
        "layer.bias": torch.randn(5).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "scale": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "deep": torch.randn(2, 3, 4),
    }


def exported(folder: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    target.mkdir()
    files = gather(dcp_weights(browse(open_store(parse_location(str(folder))))), **options)
    for name, content in files.items():
        with (target / name).open("wb") as file:
            content.write_to(file.write)
        assert (target / name).stat().st_size == content.size_bytes
    names = [name for name in files if name.endswith("s")]
    return {name: one for file in names for name, one in load_file(target / file).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("part", ["model", "module", "state_dict"])
def test_the_model_among_other_parts(part: str, tmp_path: Path) -> None:
    """The optimizer's tensors stay behind."""
    model = state()
    optimizer = {"state": {"layer.weight": {"exp_avg": torch.ones(5, 7)}}, "lr": 0.1}
    dcp.save({part: model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    assert_same(exported(tmp_path / "saved", tmp_path / "out"), model)


def test_a_state_dict_without_parts(tmp_path: Path) -> None:
    """All of it is the model."""
    model = state()
    dcp.save(dict(model), checkpoint_id=tmp_path / "saved")
    assert_same(exported(tmp_path / "saved", tmp_path / "out"), model)


def test_several_files(tmp_path: Path) -> None:
    """With an index, as transformers reads it."""
    model = state()
    dcp.save({"model": model}, checkpoint_id=tmp_path / "saved")
    assert_same(exported(tmp_path / "saved", tmp_path / "out", max_file_bytes=100), model)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_a_model_inside_of_a_part(tmp_path: Path) -> None:
    """As an application state holds it; a weight may be called like a part of another."""
    model = {**state(), "optimized_head": torch.ones(3)}
    optimizer = {"state": {"layer.weight": {"exp_avg": torch.ones(5, 7)}}}
    dcp.save({"app": {"model": model, "optim": optimizer}}, checkpoint_id=tmp_path / "saved")
    assert_same(exported(tmp_path / "saved", tmp_path / "out"), model)


def test_several_models_are_refused(tmp_path: Path) -> None:
    """It is unknown which one to export."""
    content = {"a": {"model": {"weight": torch.ones(2)}}, "b": {"model": {"weight": torch.ones(2)}}}
    dcp.save(content, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds 2 models"):
        dcp_weights(tmp_path / "saved")


def test_an_optimizer_alone_is_no_model(tmp_path: Path) -> None:
    """And says so."""
    dcp.save({"optimizer": {"moment": torch.ones(3)}}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds no weights of a model"):
        dcp_weights(tmp_path / "saved")


def test_a_file_outside_is_not_read(tmp_path: Path) -> None:
    """A hostile name is refused before it is used."""
    folder = tmp_path / "saved"
    dcp.save({"model": state()}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../outside.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which leaves the checkpoint's folder"):
        dcp_weights(folder)


def test_a_missing_part_is_found_out(tmp_path: Path) -> None:
    """Nothing is filled up with zeros."""
    folder = tmp_path / "saved"
    dcp.save({"model": state()}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.layer.weight"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="do not make the whole tensor"):
        dcp_weights(folder)
