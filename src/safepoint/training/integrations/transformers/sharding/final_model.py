"""Plans the files of the finished model in the layout of `from_pretrained`, without gathering it on one rank.

The Trainer's own routine runs on the first rank with placeholders for the weights, which have a shape and no content.
The files, names and metadata that it would write are the plan. It writes small files itself. The content of the large
ones comes piece by piece from the ranks that have it.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from safepoint.checkpoint.format.safetensors_layout import KINDS, Shape, lay_out
from safepoint.snapshot.images.function_patch import FunctionPatch
from safepoint.training.collective.peers import Peers
from safepoint.training.engine.streams import StreamedFile, Streams, WeightRange
from safepoint.training.integrations.transformers.sharding.shards import Span, Weight, owners_of, weights_of
from safepoint.training.state.base_model import has_adapters


class PlannedFile(NamedTuple):
    """A safetensors file.

    Args:
        path: of the file.
        names: in the file → in the model.
        metadata: see `lay_out`.
    """

    path: str
    names: dict[str, str]
    metadata: dict[str, str] | None


class UnplannableError(Exception):
    """The library changes the weights when it saves them, so its own routine has to write them."""


def plan_final_model(
    model: Any, folder: Path, peers: Peers, save: Callable[[dict[str, torch.Tensor]], None], *, step: int | None
) -> Streams | None:
    """Plan the model's files; all ranks call it.

    Of a model with adapters only the adapters are saved. They are small, so the first rank gathers and writes them.

    Args:
        model: on all ranks.
        folder: where the first rank writes small files.
        peers: all ranks.
        save: writes a state dict and its accompanying files into the folder; only called on the first rank.
        step: see `Streams`.

    Returns:
        The files that were not written; None when all were.

    Raises:
        UnplannableError: there is no plan; raised on all ranks, before weights are written.
        OSError: the disk is full or missing; on the first rank.
        PeerError: a rank is gone.
    """
    weights: dict[str, Weight] = {}
    problem = ""
    is_small = has_adapters(model)
    try:
        weights = weights_of(model, trained_only=is_small)
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one's answer
        problem = str(error) or type(error).__name__
    answers = peers.gather((problem, {name: weight.span for name, weight in weights.items()}))
    problem = next((text for text, _ in answers if text), "")
    plan: list[PlannedFile] = []
    owners: dict[str, list[tuple[int, Span]]] = {}
    if not problem and peers.place.is_first:
        try:
            owners = owners_of((spans for _, spans in answers), weights)
            plan = [] if is_small else _plan(weights, save)
        except Exception as error:  # noqa: BLE001  the other ranks wait for the plan
            problem = str(error) or type(error).__name__
    problem = peers.from_first(problem)
    if problem:
        raise UnplannableError(problem)
    if not is_small:
        files = tuple(_streamed(file, folder, owners, weights) for file in plan)

        def bytes_of(name: str, begin: int, num_bytes: int) -> torch.Tensor:
            return weights[name].bytes_of(begin, num_bytes)

        return Streams(files=files, bytes_of=bytes_of, step=step)
    state = _whole(peers.from_first(owners), weights, peers)
    if peers.place.is_first:
        save(state)
    return None


def _streamed(
    file: PlannedFile, folder: Path, owners: Mapping[str, list[tuple[int, Span]]], weights: Mapping[str, Weight]
) -> StreamedFile:
    shapes = [_shape(name, weights[inner]) for name, inner in file.names.items()]
    layout = lay_out(shapes, file.metadata)
    parts: list[bytes | WeightRange] = [layout.header]
    for shape, _ in layout.places:
        inner = file.names[shape.name]
        parts += [WeightRange(rank, inner, span.begin, span.num_bytes) for rank, span in owners[inner]]
    path = os.path.relpath(os.path.abspath(file.path), os.path.abspath(folder))
    return StreamedFile(path, layout.size_bytes, parts)


def _plan(weights: Mapping[str, Weight], save: Callable[[dict[str, torch.Tensor]], None]) -> list[PlannedFile]:
    placeholders: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.identity not in placeholders:
            placeholder = placeholders[weight.identity] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            names[id(placeholder)] = name
        state[name] = placeholders[weight.identity]
    planned: list[PlannedFile] = []

    def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Any = None, **_: Any) -> None:
        unknown = [name for name, tensor in tensors.items() if id(tensor) not in names]
        if unknown:
            raise UnplannableError(f"{unknown[0]} is computed when it is saved")
        if any(str(tensor.dtype).removeprefix("torch.") not in KINDS for tensor in tensors.values()):
            raise UnplannableError("safetensors does not know a weight's type")
        found = {name: names[id(tensor)] for name, tensor in tensors.items()}
        planned.append(PlannedFile(os.fspath(filename), found, metadata))

    with _saving_with(save_file):
        save(state)
    return planned


@contextlib.contextmanager
def _saving_with(save_file: Callable[..., None]) -> Generator[None]:
    library: Any = importlib.import_module("safetensors.torch")
    with FunctionPatch().exchanged({library.save_file: save_file}):
        yield


def _whole(
    owners: Mapping[str, list[tuple[int, Span]]], weights: Mapping[str, Weight], peers: Peers
) -> dict[str, torch.Tensor]:
    """All weights on the first rank; nothing on the others."""
    state: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    for name, weight in weights.items():
        size = torch.Size(weight.shape).numel() * weight.dtype.itemsize
        content = torch.empty(size if peers.place.is_first else 0, dtype=torch.uint8)
        for rank, span in owners[name]:
            buffer = content[span.begin : span.begin + span.num_bytes]
            block, error = _block(weight, rank, span.begin, span.num_bytes, buffer, peers)
            problem = problem or error
            if block is not None:
                buffer.copy_(block)
        if peers.place.is_first:
            state[name] = content.view(weight.dtype).reshape(weight.shape)
    if problem is not None:
        raise problem
    return state


def _shape(name: str, weight: Weight) -> Shape:
    return Shape(name, KINDS[str(weight.dtype).removeprefix("torch.")], weight.shape)


def _block(
    weight: Weight, rank: int, begin: int, count: int, buffer: torch.Tensor, peers: Peers
) -> tuple[torch.Tensor | None, Exception | None]:
    """Bytes of a weight on the first rank, None on all others; and why this rank could not send its own."""
    mine = peers.place.rank
    error: Exception | None = None
    if mine == rank:
        try:
            block = weight.bytes_of(begin, count)
        except Exception as reason:  # noqa: BLE001  the first rank waits for it
            block, error = torch.zeros(count, dtype=torch.uint8), reason
        peers.to_first(block, rank)
        return (block if mine == 0 else None), error
    if mine == 0:
        peers.to_first(buffer[:count], rank)
        return buffer[:count], None
    return None, None
