"""Shards of `fully_shard`, saved by DCP: which of their bytes only the optimizer changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safepoint.snapshot.images.capture import Capture
from safepoint.snapshot.images.image import Image, Piece
from safepoint.snapshot.staging.guard import Guard


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _image(capture: Capture, root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Image:
    (root / "sub").mkdir(parents=True)
    with capture.below(root) as captured:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=root / "sub")
    return next(image for image in capture.collect(captured) if image.path.endswith(".distcp"))


@pytest.mark.filterwarnings("ignore:.*lazily.*")
def test_shards_belong_to_the_optimizer(tmp_path: Path) -> None:
    """All of them are copied beside the next step, and stay the same pieces from save to save."""
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    capture = Capture()
    _step(model, optimizer)
    guard = Guard(lambda _: None, [optimizer])
    try:
        image = _image(capture, tmp_path / "1", model, optimizer)
        guard.refresh()
        owners = [guard.owner_of(piece) for piece in image.pieces]
        assert len(image.pieces) == 4 * 4  # weight, two moments and the count of steps
        assert all(owner is not None for owner in owners)
        _step(model, optimizer)
        assert _image(capture, tmp_path / "2", model, optimizer).pieces is image.pieces
    finally:
        guard.close()


def test_a_part_of_a_storage_that_the_optimizer_does_not_own() -> None:
    """An optimizer that owns half of a storage owns a piece of that half, and no more."""
    storage = torch.zeros(100)
    mine = torch.nn.Parameter(storage[:50])
    guard = Guard(lambda _: None, [torch.optim.SGD([mine], lr=0.1)])
    try:
        guard.refresh()
        half = dcp_piece(storage, 0, 50)
        assert guard.owner_of(half) is not None
        assert guard.owner_of(dcp_piece(storage, 10, 40)) is not None
        assert guard.owner_of(dcp_piece(storage, 40, 60)) is None
        assert guard.owner_of(dcp_piece(storage, 50, 100)) is None
    finally:
        guard.close()


def dcp_piece(tensor: torch.Tensor, begin: int, end: int) -> Piece:

    base = tensor.untyped_storage().data_ptr()
    size = tensor.element_size()
    return Piece(0, (end - begin) * size, base + begin * size, base, tensor, "cpu")
