"""Where the bytes of each weight are, over all ranks, whatever the strategy."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """A stretch of a weight's bytes, in the order of its elements.

    Args:
        begin: the first byte.
        num_bytes: how many.
    """

    begin: int
    num_bytes: int


class Weight:
    """One weight, of which this rank has all, a part, or nothing.

    Args:
        dtype: of its elements.
        shape: of the whole.
        span: what this rank has; None when that is not one stretch, or nothing.
        local: that part, as it lies in memory; None likewise.
        identity: the same for weights that are tied.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], span: Span | None, local: torch.Tensor | None, identity: int
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.span = span
        self._local = local
        self.identity = identity

    def bytes_of(self, begin: int, num_bytes: int) -> torch.Tensor:
        """A stretch of what this rank has, as uint8 on the CPU; `begin` counts from the weight's first byte."""
        assert self.span is not None
        assert self._local is not None
        start, local = begin - self.span.begin, self._local.detach()
        if not local.is_contiguous():  # of a weight in another order only the rows that are wanted are put in order
            row_bytes = local[0].numel() * local.element_size()
            first = start // row_bytes
            local = local[first : -(-(start + num_bytes) // row_bytes)]
            start -= first * row_bytes
        flat = local.contiguous().reshape(-1).view(torch.uint8)
        return flat[start : start + num_bytes].cpu()


def weights_of(model: Any, *, trained_only: bool = False) -> dict[str, Weight]:
    """All weights and saved buffers of a model, by the names of its state dict.

    Args:
        model: in training, on this rank.
        trained_only: whether to leave out what is frozen.

    Raises:
        ValueError: a weight is shared between the ranks in a way that is not known here.
    """
    split = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Weight] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if trained_only and not getattr(tensor, "requires_grad", False):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is no tensor")  # noqa: TRY004  a property of the model, not of the call
        if hasattr(split.get(name), "ds_tensor"):
            found[name] = _of_deepspeed(split[name])
        elif hasattr(tensor, "_local_tensor"):
            found[name] = _of_dtensor(name, tensor)
        else:
            span = Span(0, tensor.nbytes)
            found[name] = Weight(tensor.dtype, tuple(tensor.shape), span, tensor.detach(), id(tensor))
    return found


def _of_dtensor(name: str, tensor: Any) -> Weight:
    shape = tuple(tensor.shape)
    local = tensor._local_tensor
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if chunk.sizes.numel()]
    if not chunks:
        return Weight(tensor.dtype, shape, None, None, id(tensor))
    (chunk,) = chunks
    if any(chunk.offsets[1:]) or tuple(chunk.sizes[1:]) != shape[1:]:
        raise ValueError(f"{name} is not shared by its first dimension")
    per_row = local.element_size() * (torch.Size(shape[1:]).numel() if shape else 1)
    begin = (chunk.offsets[0] if shape else 0) * per_row
    return Weight(tensor.dtype, shape, Span(begin, local.nbytes), local, id(tensor))


def _of_deepspeed(parameter: Any) -> Weight:
    """ZeRO-3 cuts the flat weight into equal parts, the last of which is padded."""
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
    """Which rank gives which stretch of each weight, each byte once.

    Args:
        spans: what each rank has of each weight, by rank.
        weights: of this rank.

    Raises:
        ValueError: a stretch of a weight is nowhere.
    """
    by_rank = list(spans)
    found: dict[str, list[tuple[int, Span]]] = {}
    for name, weight in weights.items():
        size = torch.Size(weight.shape).numel() * weight.dtype.itemsize
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
        if end != size:
            raise ValueError(f"a part of {name} is on no rank")
    return found
