"""Where the bytes of a weight are under every strategy: the stretches of all ranks are the weight, each byte once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.training.integrations.transformers.sharding.shards import Weight, owners_of, weights_of


class Model:
    """Has whatever parameters and state it is given."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors

    def named_parameters(self, *, remove_duplicate: bool) -> Any:
        return self.tensors.items()

    def state_dict(self, *, keep_vars: bool) -> dict[str, Any]:
        return self.tensors


def sharded(whole: torch.Tensor, rank: int, num_ranks: int) -> Any:
    """As `fully_shard` leaves a parameter: rows, the last ranks with fewer or none."""
    rows = -(-len(whole) // num_ranks)
    mine = whole[rank * rows : (rank + 1) * rows]

    class Shard(torch.Tensor):
        _local_tensor = mine

        def __create_chunk_list__(self) -> list[Any]:
            offsets = torch.Size((min(rank * rows, len(whole)), *[0] * (whole.dim() - 1)))
            return [SimpleNamespace(offsets=offsets, sizes=mine.shape)]

    return whole.detach().as_subclass(Shard)


def partitioned(whole: torch.Tensor, rank: int, num_ranks: int) -> Any:
    """As ZeRO-3 leaves a parameter: equal parts of the flat weight, the last one padded."""
    each = -(-whole.numel() // num_ranks)
    padded = torch.cat([whole.flatten(), torch.full((each * num_ranks - whole.numel(),), -1, dtype=whole.dtype)])
    parameter: Any = torch.nn.Parameter(torch.empty(0, dtype=whole.dtype))
    parameter.ds_tensor = padded[rank * each : (rank + 1) * each].clone()
    parameter.ds_process_group, parameter.ds_numel, parameter.ds_shape = rank, whole.numel(), whole.shape
    return parameter


def gathered(name: str, ranks: list[dict[str, Weight]], block_bytes: int) -> torch.Tensor:
    """The weight, stretch by stretch from the rank that has it, no more than so many bytes at a time."""
    owners = owners_of([{key: weight.span for key, weight in rank.items()} for rank in ranks], ranks[0])
    content = b""
    for rank, span in owners[name]:
        for begin in range(span.begin, span.begin + span.num_bytes, block_bytes):
            count = min(block_bytes, span.begin + span.num_bytes - begin)
            block = ranks[rank][name].bytes_of(begin, count)
            assert block.dtype is torch.uint8
            content += block.numpy().tobytes()
    weight = ranks[0][name]
    return torch.frombuffer(bytearray(content), dtype=weight.dtype).reshape(weight.shape)


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group)


@pytest.mark.parametrize("block_bytes", [1 << 20, 24, 7], ids=["at once", "in rows", "anywhere"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [sharded, partitioned])
def test_together_they_are_the_weight(share: Any, num_ranks: int, block_bytes: int) -> None:
    """Also where it cannot be shared equally, where some rank has nothing, and in two bytes an element."""
    weights = {
        "even": torch.randn(6, 4),
        "odd": torch.randn(7, 3),
        "few": torch.randn(2, 5),
        "flat": torch.randn(11).bfloat16(),
    }
    ranks = [
        weights_of(Model(**{name: share(whole, rank, num_ranks) for name, whole in weights.items()}))
        for rank in range(num_ranks)
    ]
    for name, whole in weights.items():
        assert torch.equal(gathered(name, ranks, block_bytes), whole), name


@pytest.mark.parametrize("block_bytes", [1 << 20, 24, 7])
def test_a_weight_in_another_order(block_bytes: int) -> None:
    """It is not copied when it is found, and comes in the order of its elements."""
    whole = torch.randn(5, 6).t()
    found = weights_of(Model(weight=whole))
    assert found["weight"]._local.data_ptr() == whole.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(gathered("weight", [found], block_bytes), whole)


def test_what_all_have_comes_from_the_first() -> None:
    """Replicas: no other rank gives anything."""
    ranks = [weights_of(Model(weight=torch.ones(4))) for _ in range(3)]
    owners = owners_of([{name: one.span for name, one in rank.items()} for rank in ranks], ranks[0])
    assert [rank for rank, _ in owners["weight"]] == [0]


def test_a_stretch_that_nobody_has() -> None:
    """It is noticed before anything is written."""
    ranks = [weights_of(Model(weight=sharded(torch.randn(6, 2), rank, 3))) for rank in (0, 2)]
    with pytest.raises(ValueError, match="a part of weight is on no rank"):
        owners_of([{name: one.span for name, one in rank.items()} for rank in ranks], ranks[0])
