"""Plans the files of the final model in the layout of `from_pretrained`. The model is not gathered on one rank.

The Trainer's own routine runs on the first rank with placeholders for the weights. A placeholder has a shape and no
content. The plan consists of the files, names and metadata that the routine would write. The routine itself writes
the small files. The content of the large files comes piece by piece from the ranks that have it.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.checkpoint.format.safetensors_layout import KINDS, Shape, lay_out
from safepoint.snapshot.images.function_patch import FunctionPatch
from safepoint.training.collective.peers import Peers
from safepoint.training.engine.streams import StreamedFile, Streams, WeightRange
from safepoint.training.integrations.transformers.sharding.shards import Span, Weight, owners_of, weights_of
from safepoint.training.state.base_model import has_adapters


class UnplannableError(Exception):
    """The files cannot be planned, for example because a library changes the weights when it saves them.

    The library's own routine must then gather and write the model.
    """


def plan_final_model(
    model: Any, folder: Path, peers: Peers, save: Callable[[dict[str, torch.Tensor]], None], *, step: int | None
) -> Streams | None:
    """Plan the model's files; all ranks call this function.

    If the model has adapters, only the adapters are saved. They are small, so the first rank gathers and writes them.

    Args:
        model: the model on this rank. The rank may have only parts of the weights.
        folder: where the first rank writes small files.
        peers: all ranks.
        save: writes a state dict and all other files of the model into the folder; only called on the first rank.
        step: the step of the checkpoint that has the same weights; None if there is no such checkpoint.

    Returns:
        The files that are still to be written; None if all are written.

    Raises:
        UnplannableError: the files cannot be planned; raised on all ranks, before weights are written.
        OSError: the disk is full or missing. Only the first rank raises this error.
        PeerError: a rank is gone.
    """
    weights: dict[str, Weight] = {}
    problem = ""
    is_small = has_adapters(model)
    try:
        weights = weights_of(model, trained_only=is_small)
    except Exception as error:  # noqa: BLE001  the other ranks wait for this rank's message
        problem = str(error) or type(error).__name__
    answers = peers.gather((problem, {name: weight.span for name, weight in weights.items()}))
    problem = next((text for text, _ in answers if text), "")
    files: list[StreamedFile] = []
    owners: dict[str, list[tuple[int, Span]]] = {}
    failure: OSError | None = None
    if not problem and peers.place.is_first:
        try:
            owners = owners_of((spans for _, spans in answers), weights)
            files = [] if is_small else _plan(folder, owners, weights, save)
        except Exception as error:  # noqa: BLE001  the other ranks wait for the plan
            # If the disk is full, the library could not write the whole model either. A library also raises OSError
            # for reasons of its own, without a number.
            if isinstance(error, OSError) and error.errno is not None:
                failure = error
            else:
                problem = str(error) or type(error).__name__
    problem = peers.from_first(problem)
    if failure is not None:
        raise failure
    if problem:
        raise UnplannableError(problem)
    if not is_small:

        def bytes_of(name: str, begin: int, num_bytes: int) -> torch.Tensor:
            return weights[name].bytes_of(begin, num_bytes)

        return Streams(files=tuple(files), bytes_of=bytes_of, step=step)
    state = _whole(peers.from_first(owners), weights, peers)
    if peers.place.is_first:
        save(state)
    return None


def _plan(
    folder: Path,
    owners: Mapping[str, list[tuple[int, Span]]],
    weights: Mapping[str, Weight],
    save: Callable[[dict[str, torch.Tensor]], None],
) -> list[StreamedFile]:
    placeholders: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    state: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.identity not in placeholders:
            placeholder = placeholders[weight.identity] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            names[id(placeholder)] = name
        state[name] = placeholders[weight.identity]
    planned: list[StreamedFile] = []

    def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Any = None, **_: Any) -> None:
        shapes: list[Shape] = []
        for name, tensor in tensors.items():
            kind = KINDS.get(str(tensor.dtype).removeprefix("torch."))
            if id(tensor) not in names:
                raise UnplannableError(f"{name} is computed when it is saved")
            if kind is None:
                raise UnplannableError(f"{name} has the type {tensor.dtype}, which safetensors cannot store")
            shapes.append(Shape(name, kind, tuple(tensor.shape)))
        layout = lay_out(shapes, metadata)
        parts: list[bytes | WeightRange] = [layout.header]
        for shape, _begin in layout.places:
            name = names[id(tensors[shape.name])]
            parts += [WeightRange(rank, name, span.begin, span.num_bytes) for rank, span in owners[name]]
        path = os.path.relpath(os.path.abspath(filename), os.path.abspath(folder))
        planned.append(StreamedFile(path, layout.size_bytes, parts))

    library: Any = importlib.import_module("safetensors.torch")
    with FunctionPatch().exchanged({library.save_file: save_file}):
        save(state)
    return planned


def _whole(
    owners: Mapping[str, list[tuple[int, Span]]], weights: Mapping[str, Weight], peers: Peers
) -> dict[str, torch.Tensor]:
    """All weights on the first rank; an empty dict on the other ranks."""
    state: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    for name, weight in weights.items():
        content = torch.empty(weight.size_bytes, dtype=torch.uint8)
        for rank, span in owners[name]:
            block = content[span.begin : span.begin + span.num_bytes]
            if rank == peers.place.rank:
                try:
                    block.copy_(weight.bytes_of(span.begin, span.num_bytes))
                except Exception as error:  # noqa: BLE001  the first rank waits for the block
                    problem = error
            peers.to_first(block, rank)
        if peers.place.is_first:
            state[name] = content.view(weight.dtype).reshape(weight.shape)
    if problem is not None:
        raise problem
    return state
