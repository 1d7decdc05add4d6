"""Which rank has which bytes of each weight, for every strategy by which ranks share a model (DDP, FSDP, ZeRO)."""

import contextlib
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from safepoint.training.compatibility.peft_releases import without_wrappers


class Span(NamedTuple):
    """Consecutive bytes of a weight, in the order of its elements.

    Args:
        begin: the offset of the first byte in the weight.
        num_bytes: the number of bytes.
    """

    begin: int
    num_bytes: int


class Weight:
    """One weight. This rank has all bytes of the weight, some bytes, or none.

    Args:
        dtype: the type of the weight's elements.
        shape: the shape of the whole weight.
        span: the bytes that this rank has; None if it has none.
        local: a tensor with these bytes; None if this rank has none.
        identity: a number that is the same for tied weights.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], span: Span | None, local: torch.Tensor | None, identity: int
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.span = span
        self._local = local
        self.identity = identity

    @property
    def size_bytes(self) -> int:
        """The size of the whole weight."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def bytes_of(self, begin: int, num_bytes: int) -> torch.Tensor:
        """Some of this rank's bytes, as uint8 on the CPU. `begin` is an offset from the first byte of the weight."""
        assert self.span is not None
        assert self._local is not None
        start, local = begin - self.span.begin, self._local.detach()
        if not local.is_contiguous():  # copy only the requested rows of a strided weight
            row_bytes = local[0].numel() * local.element_size()
            first = start // row_bytes
            local = local[first : -(-(start + num_bytes) // row_bytes)]
            start -= first * row_bytes
        flat = local.contiguous().reshape(-1).view(torch.uint8)
        return flat[start : start + num_bytes].cpu()


def weights_of(model: Any, *, trained_only: bool = False) -> dict[str, Weight]:
    """All weights and saved buffers of a model, by the names of its state dict.

    Args:
        model: the model that this rank trains.
        trained_only: whether to leave out frozen weights, and buffers.

    Raises:
        ValueError: a weight is split among the ranks in an unknown way, or an entry of the state dict is not a
            tensor.
    """
    split = {without_wrappers(name): one for name, one in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Weight] = {}
    with _in_shards(model):
        state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if trained_only and not getattr(split.get(name, tensor), "requires_grad", False):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is not a tensor")  # noqa: TRY004  a property of the model, not of the call
        if hasattr(split.get(name), "ds_tensor"):
            found[name] = _of_deepspeed(split[name])
        elif hasattr(tensor, "_local_tensor"):
            found[name] = _of_dtensor(name, tensor)
        elif hasattr(tensor, "local_shards"):
            found[name] = _of_fsdp1(name, tensor)
        else:
            span = Span(0, tensor.nbytes)
            found[name] = Weight(tensor.dtype, tuple(tensor.shape), span, tensor.detach(), id(tensor))
    return found


@contextlib.contextmanager
def _in_shards(model: Any) -> Generator[None]:
    """While the block runs, the state dict of a model under FSDP1 has the shards of this rank, not whole weights."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FullyShardedDataParallel):
        yield
        return
    with warnings.catch_warnings():
        # torch announces that these functions, and the type of the shards, will be replaced.
        warnings.filterwarnings("ignore", category=FutureWarning)
        with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
            yield


def _of_fsdp1(name: str, tensor: Any) -> Weight:
    """A weight under FSDP1: a `ShardedTensor`, split along its first dimension."""
    shape = tuple(tensor.metadata().size)
    dtype = tensor.metadata().tensor_properties.dtype
    shards = tensor.local_shards()
    if not shards:
        return Weight(dtype, shape, None, None, id(tensor))
    (shard,) = shards
    if any(shard.metadata.shard_offsets[1:]) or tuple(shard.metadata.shard_sizes[1:]) != shape[1:]:
        raise ValueError(f"{name} is not split along its first dimension")
    local = shard.tensor
    per_row = local.element_size() * torch.Size(shape[1:]).numel()
    return Weight(dtype, shape, Span(shard.metadata.shard_offsets[0] * per_row, local.nbytes), local, id(tensor))


def _of_dtensor(name: str, tensor: Any) -> Weight:
    shape = tuple(tensor.shape)
    local = tensor._local_tensor
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    if not chunks:
        return Weight(tensor.dtype, shape, None, None, id(tensor))
    (chunk,) = chunks
    if any(chunk.offsets[1:]) or tuple(chunk.sizes[1:]) != shape[1:]:
        raise ValueError(f"{name} is not split along its first dimension")
    per_row = local.element_size() * (torch.Size(shape[1:]).numel() if shape else 1)
    begin = (chunk.offsets[0] if shape else 0) * per_row
    return Weight(tensor.dtype, shape, Span(begin, local.nbytes), local, id(tensor))


def _of_deepspeed(parameter: Any) -> Weight:
    """A weight under ZeRO-3. ZeRO-3 splits the flat weight into equal parts, and pads the last part."""
    import torch.distributed as dist

    part = parameter.ds_tensor
    rank = dist.get_rank(group=parameter.ds_process_group)
    begin = rank * part.numel()
    count = max(0, min(part.numel(), parameter.ds_numel - begin))
    size = part.element_size()
    span = Span(begin * size, count * size) if count else None
    local = part.data[:count] if count else None
    return Weight(part.dtype, tuple(parameter.ds_shape), span, local, id(parameter))


def owners_of(
    spans: Iterable[Mapping[str, Span | None]], weights: Mapping[str, Weight]
) -> dict[str, list[tuple[int, Span]]]:
    """Assign each byte of each weight to one rank.

    Args:
        spans: one mapping for each rank, in the order of the ranks: the bytes of each weight that this rank has.
        weights: the weights on this rank.

    Raises:
        ValueError: a part of a weight is on no rank.
    """
    by_rank = list(spans)
    found: dict[str, list[tuple[int, Span]]] = {}
    for name, weight in weights.items():
        given: dict[int, tuple[int, Span]] = {}
        for rank, of_rank in enumerate(by_rank):
            span = of_rank[name]
            if span is not None:
                given.setdefault(span.begin, (rank, span))
        found[name] = [given[begin] for begin in sorted(given)]
        end = 0
        for _, span in found[name]:
            if span.begin != end:
                break
            end += span.num_bytes
        if end != weight.size_bytes:
            raise ValueError(f"a part of {name} is on no rank")
    return found
