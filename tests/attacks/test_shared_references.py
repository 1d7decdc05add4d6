"""Small checkpoints that name one object again and again: `export` counts what they describe before it makes it.

An attack that describes much runs in a process of its own, with little memory. The others are small: their steps are
counted, or a limit is lowered.
"""

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from safepoint.checkpoint.tools.export import export_pieces
from safepoint.checkpoint.weights import budget
from safepoint.checkpoint.weights import dcp_weights as dcp
from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.torch_file import StoredTensor
from safepoint.checkpoint.weights.zero_weights import zero_weights
from safepoint.errors import CheckpointError
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store

_LIMIT_S = 60
_ADDRESS_SPACE = 2 << 30
_EXPORT = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    from pathlib import Path
    from safepoint.checkpoint.tools.export import export_pieces
    from safepoint.storage.location import Location
    from safepoint.storage.opening import open_store
    folder = Path(sys.argv[1])
    export_pieces(open_store(Location.of_folder(folder)), "", Location.of_folder(folder.with_name("exported")))
"""


def _refused(folder: Path) -> str:
    """The error with which an export ends that has little memory."""
    program = textwrap.dedent(_EXPORT).replace("SPACE", str(_ADDRESS_SPACE))
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 30 << 20
    return done.stderr.splitlines()[-1]


def _export(folder: Path) -> None:
    export_pieces(open_store(Location.of_folder(folder)), "", Location.of_folder(folder.with_name("exported")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    return made


# ---- one file of torch.save -------------------------------------------------------------------------------------


@pytest.mark.timeout(_LIMIT_S + 10)
def test_many_names_of_one_tensor(folder: Path) -> None:
    """The tensor is a number a million times, which is allowed; its hundred names are a hundred million pieces."""
    tensor = torch.zeros(16).as_strided((1 << 20,), (0,))
    torch.save({f"w{number}": tensor for number in range(100)}, folder / "model.pt")
    assert "contiguous pieces of weights" in _refused(folder)


def test_a_tensor_that_is_larger_than_all_files(folder: Path) -> None:
    """A megabyte, repeated, is an exabyte: a bucket would take it without end."""
    tensor = torch.zeros(1 << 18).as_strided((1 << 20, 1 << 18), (0, 1))
    torch.save({"w": tensor}, folder / "model.pt")
    with pytest.raises(CheckpointError, match=r"more than 1073741824 bytes of weights"):
        _export(folder)


def test_two_names_of_one_tensor(folder: Path) -> None:
    """As of tied weights: both are exported."""
    tensor = torch.rand(64, 64).t()
    torch.save({"w": tensor, "tied": tensor, "mask": torch.ones(1).expand(30, 30)}, folder / "model.pt")
    _export(folder)
    assert (folder.with_name("exported") / "model.safetensors").stat().st_size > 4 * (2 * 64 * 64 + 30 * 30)


# ---- ZeRO -------------------------------------------------------------------------------------------------------


def _write_zero(folder: Path, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Path:
    (folder / "latest").write_text("global_step1")
    place = folder / "global_step1"
    place.mkdir()
    whole = {"optimizer_state_dict": {"partition_count": 1, **optimizer}}
    torch.save(whole, place / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"module": {}, **model}, place / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return place


@pytest.mark.timeout(_LIMIT_S + 10)
def test_one_group_of_shapes_listed_again_and_again(folder: Path) -> None:
    """Each of the 200,000 references takes five bytes, and names 20,000 weights."""
    group = {f"w{number}": torch.Size([1]) for number in range(20_000)}
    _write_zero(folder, {"param_shapes": [group] * 200_000}, {"zero_stage": 1, "single_partition_of_fp32_groups": []})
    assert "IndexError('list index out of range')" in _refused(folder)  # the first group lacks its tensor


@pytest.mark.parametrize("stage", [1, 3])
def test_one_group_with_its_tensors(stage: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All references have what they need, and the names are too many together."""
    monkeypatch.setitem(budget._MOST, Cost.WEIGHTS, 1000)
    group = {f"w{number}": torch.Size([1]) for number in range(20)}
    field = "single_partition_of_fp32_groups" if stage == 1 else "fp32_flat_groups"
    _write_zero(folder, {"param_shapes": [group] * 60}, {"zero_stage": stage, field: [torch.zeros(20)] * 60})
    with pytest.raises(CheckpointError, match=r"more than 1000 weights"):
        _export(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_many_names_and_many_flat_tensors(stage: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are as many as names and tensors, not their product."""
    num_steps = 0

    def count(self: StoredTensor) -> int:
        nonlocal num_steps
        num_steps += 1
        return self.sizes[0]

    many = 1000
    group = {f"w{number}": torch.Size([1]) for number in range(many)}
    flat, ranks = torch.zeros(1), 1
    if stage == 1:  # each rank has one tensor of a group
        ranks, optimizer = 40, {"single_partition_of_fp32_groups": [torch.zeros(many // 40)]}
    else:
        optimizer = {"fp32_flat_groups": [flat] * many}
    place = _write_zero(
        folder, {"param_shapes": [group]}, {"zero_stage": stage, "partition_count": ranks, **optimizer}
    )
    for rank in range(1, ranks):
        os.link(
            place / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    monkeypatch.setattr(StoredTensor, "count", property(count))
    assert len(zero_weights(place)) == many
    assert num_steps < 10 * many


def test_many_names_of_one_trained_weight(folder: Path) -> None:
    """The weight is in a thousand pieces, and has a thousand further names."""
    model = {
        "param_shapes": [{"w": torch.Size([2000])}],
        "shared_params": [(f"alias{number}", "w") for number in range(1000)],
    }
    _write_zero(folder, model, {"zero_stage": 3, "fp32_flat_groups": [torch.zeros(1)] * 2000})
    with pytest.raises(CheckpointError, match="contiguous pieces of weights"):
        _export(folder)


# ---- torch.distributed.checkpoint -------------------------------------------------------------------------------

_CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 1]))
_EMPTY = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 1]))


def _write_dcp(folder: Path, keys: list[str], *, chunks: int = 1, path: tuple[str, ...] | None = None) -> None:
    """Each key is a tensor with `chunks` parts, of which one has the element; all parts are in one archive."""
    torch.save(torch.zeros(1, 1), folder / "0.distcp")
    place = _StorageInfo("0.distcp", 0, (folder / "0.distcp").stat().st_size)
    parts = [_CHUNK, *[_EMPTY] * (chunks - 1)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([1, 1]), parts)
    metadata = Metadata(
        state_dict_metadata=dict.fromkeys(keys, tensor),
        storage_data={MetadataIndex(key, torch.Size([0, 0])): place for key in keys},
        planner_data={} if path is None else dict.fromkeys(keys, path),
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.timeout(_LIMIT_S + 10)
def test_one_list_of_parts_for_many_keys(folder: Path) -> None:
    """A million parts, two thousand times."""
    _write_dcp(folder, [f"w{number}" for number in range(2000)], chunks=1_000_000)
    assert "parts of tensors" in _refused(folder)


@pytest.mark.timeout(_LIMIT_S + 10)
def test_one_path_for_many_keys(folder: Path) -> None:
    """A name of a million parts, twenty thousand times."""
    _write_dcp(folder, [f"w{number}" for number in range(20_000)], path=("a",) * 1_000_000)
    assert "parts of the names of tensors" in _refused(folder)


@pytest.mark.timeout(_LIMIT_S + 10)
def test_one_long_word_in_many_names(folder: Path) -> None:
    """The path is short, and its word has ten megabytes."""
    _write_dcp(folder, [f"w{number}" for number in range(2000)], path=("a" * 10_000_000,))
    assert "letters in the names of weights" in _refused(folder)


def test_one_archive_for_many_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No archive is read more than once."""
    num_reads = 0
    read = dcp.read_torch_file

    def count(*args: Any, **options: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(*args, **options)

    monkeypatch.setattr(dcp, "read_torch_file", count)
    _write_dcp(folder, [f"w{number}" for number in range(50)])
    with pytest.raises(CheckpointError, match=r"overlap at byte 0 of 0\.distcp"):
        _export(folder)
    assert num_reads <= 1


def test_parts_without_elements(folder: Path) -> None:
    """Several ranks may write them at the same offsets; no two are one archive with elements."""
    _write_dcp(folder, ["w"])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    empty = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([0, 1]))
    metadata.state_dict_metadata["w"].chunks += [empty, empty]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    _export(folder)


# ---- what must still work ---------------------------------------------------------------------------------------


def test_the_largest_models() -> None:
    """100,000 tensors over 1000 shards, in millions of pieces, with names of 200 letters."""
    left = Budget(10**12)
    left.spend(Cost.WEIGHTS, 300_000)
    left.spend(Cost.LETTERS, 300_000 * 200)
    left.spend(Cost.CHUNKS, 1_000_000)
    left.spend(Cost.PLACES, 1_000_000)
    left.spend(Cost.PATH_PARTS, 1_000_000 * 4)
    left.spend(Cost.RUNS, 8_000_000)
    left.spend(Cost.STEPS, 1000 * 1_000_000)
    left.spend(Cost.BYTES, 2 * 10**12)
