"""From weights all over a checkpoint to the files that `from_pretrained` reads, a stretch at a time."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.checkpoint.safetensors_layout import lay_out
from holdfast.checkpoint.weights.weight import StoredWeight
from holdfast.errors import CheckpointError

MAX_FILE_BYTES = 50 << 30
"""As many as transformers puts into one file."""
_BLOCK_BYTES = 8 << 20
_METADATA = {"format": "pt"}


def write_weights(
    weights: Sequence[StoredWeight],
    folder: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Write `model.safetensors`, or several files and their index.

    Args:
        weights: of the whole model.
        folder: where; it is there.
        max_file_bytes: of tensors in one file; a larger tensor has a file of its own.
        progress: told how many bytes more are there.

    Returns:
        The files.

    Raises:
        CheckpointError: a file of the checkpoint is shorter than it should be.
        OSError: a file cannot be read, or the disk is full.
    """
    groups = _split(weights, max_file_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        _write(group, folder / name, progress or (lambda _: None))
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(weight.shape.num_bytes for weight in weights)},
            "weight_map": {
                weight.shape.name: name for name, group in zip(names, groups, strict=True) for weight in group
            },
        }
        names.append("model.safetensors.index.json")
        (folder / names[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


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


def _write(weights: Sequence[StoredWeight], target: Path, progress: Callable[[int], None]) -> None:
    layout = lay_out((weight.shape for weight in weights), _METADATA)
    by_name = {weight.shape.name: weight for weight in weights}
    sources: dict[Path, int] = {}
    try:
        with target.open("xb") as file:
            os.truncate(file.fileno(), layout.size_bytes)
            os.pwrite(file.fileno(), layout.header, 0)
            for shape, place in layout.places:
                for run in by_name[shape.name].runs:
                    if run.path not in sources:
                        sources[run.path] = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
                    _copy(sources[run.path], run.offset, file.fileno(), place + run.begin, run.num_bytes, progress)
    finally:
        for descriptor in sources.values():
            os.close(descriptor)


def _copy(source: int, offset: int, target: int, place: int, num_bytes: int, progress: Callable[[int], None]) -> None:
    while num_bytes:
        data = os.pread(source, min(num_bytes, _BLOCK_BYTES), offset)
        if not data:
            raise CheckpointError("a file of the checkpoint is shorter than it should be")
        view = memoryview(data)
        while view:
            written = os.pwrite(target, view, place)
            view, place = view[written:], place + written
        offset, num_bytes = offset + len(data), num_bytes - len(data)
        progress(len(data))


__all__ = ["MAX_FILE_BYTES", "write_weights"]
