"""From weights all over a checkpoint to the files that `from_pretrained` reads, a stretch at a time."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from safepoint.checkpoint.format.safetensors_layout import Layout, lay_out
from safepoint.checkpoint.weights.weight import Run, StoredWeight
from safepoint.errors import CheckpointError, StorageError
from safepoint.storage.browsing import ReadablePath, StorePath
from safepoint.storage.read_ahead import stream_ahead
from safepoint.storage.store import Content, Sink

MAX_FILE_BYTES = 50 << 30
"""As many as transformers puts into one file."""
_BLOCK_BYTES = 4 << 20
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
        weights: of the whole model.
        max_file_bytes: of tensors in one file; a larger tensor has a file of its own.

    Returns:
        The files. Pouring one raises CheckpointError when a file of the checkpoint is shorter than it should be, and
        StorageError when it cannot be read.
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
    """Bytes that are there already."""
    return Content(size_bytes=len(data), pour=lambda sink: sink(memoryview(data)))


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

    def pour(sink: Sink) -> None:
        sink(memoryview(layout.header))
        runs = _in_order(layout, by_name)
        if all(isinstance(run.path, StorePath) for run in runs):
            stream_ahead((cast("StorePath", run.path).stretch(run.offset, run.num_bytes) for run in runs), sink)
        else:
            _pour(runs, sink)

    return Content(size_bytes=layout.size_bytes, pour=pour)


def _in_order(layout: Layout, by_name: dict[str, StoredWeight]) -> list[Run]:
    return [run for shape, _ in layout.places for run in by_name[shape.name].runs]


def _pour(runs: Iterable[Run], sink: Sink) -> None:
    """From files of this machine."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with _Sources() as sources:
        for run in runs:
            for begin in range(0, run.num_bytes, _BLOCK_BYTES):
                block = buffer[: min(_BLOCK_BYTES, run.num_bytes - begin)]
                sources.read(run.path, run.offset + begin, block)
                sink(block)


class _Sources:
    """Files that are read from again and again; open until the end."""

    def __init__(self) -> None:
        self._descriptors: dict[ReadablePath, int] = {}

    def __enter__(self) -> "_Sources":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, path: ReadablePath, offset: int, block: memoryview) -> None:
        try:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(cast("Path", path), os.O_RDONLY | os.O_CLOEXEC)
            while block:
                count = os.preadv(self._descriptors[path], [block], offset)
                if count == 0:
                    raise CheckpointError("a file of the checkpoint is shorter than it should be")
                block, offset = block[count:], offset + count
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
