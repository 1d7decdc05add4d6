"""From weights that are spread over a checkpoint to the files that `from_pretrained` reads, a range at a time."""

import json
from collections.abc import Sequence
from typing import NamedTuple, cast

from safepoint.checkpoint.format.safetensors_layout import lay_out
from safepoint.checkpoint.weights.weight import StoredWeight
from safepoint.storage.browsing import StorePath
from safepoint.storage.read_ahead import stream_ahead
from safepoint.storage.store import Content, Sink

MAX_FILE_BYTES = 50 << 30
"""As many as transformers puts into one file."""
_METADATA = {"format": "pt"}


class GatheredFile(NamedTuple):
    """A file of the model.

    Args:
        name: of it.
        content: where its bytes come from.
    """

    name: str
    content: Content


def gather(weights: Sequence[StoredWeight], *, max_file_bytes: int = MAX_FILE_BYTES) -> list[GatheredFile]:
    """Lay out `model.safetensors`, or several files and their index.

    Args:
        weights: of the whole model, found by way of `safepoint.storage.browsing.browse`.
        max_file_bytes: of tensors in one file; a larger tensor has a file of its own.

    Returns:
        The files. Pouring one raises StorageError when a file of the checkpoint is shorter than it should be, or
        cannot be read.
    """
    groups = _split(weights, max_file_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    files = [GatheredFile(name, _content(group)) for name, group in zip(names, groups, strict=True)]
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(weight.shape.num_bytes for weight in weights)},
            "weight_map": {
                weight.shape.name: name for name, group in zip(names, groups, strict=True) for weight in group
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files.append(GatheredFile("model.safetensors.index.json", content_of(text.encode())))
    return files


def content_of(data: bytes) -> Content:
    """A stream of bytes in memory."""
    return Content(size_bytes=len(data), write_to=lambda sink: sink(memoryview(data)))


def _split(weights: Sequence[StoredWeight], max_file_bytes: int) -> list[list[StoredWeight]]:
    groups: list[list[StoredWeight]] = [[]]
    size = 0
    for weight in weights:
        if groups[-1] and size + weight.shape.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += weight.shape.num_bytes
    return groups


def _content(weights: Sequence[StoredWeight]) -> Content:
    layout = lay_out((weight.shape for weight in weights), _METADATA)
    by_name = {weight.shape.name: weight for weight in weights}

    def write_to(sink: Sink) -> None:
        sink(memoryview(layout.header))
        runs = (run for shape, _ in layout.places for run in by_name[shape.name].runs)
        stream_ahead((cast("StorePath", run.path).byte_range(run.offset, run.num_bytes) for run in runs), sink)

    return Content(size_bytes=layout.size_bytes, write_to=write_to)
