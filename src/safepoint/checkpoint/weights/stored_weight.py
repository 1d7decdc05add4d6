"""Weights as ranges of files, and a stream of these ranges for each file that `from_pretrained` reads."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from safepoint.checkpoint.format.read_ranges import ReadRanges
from safepoint.checkpoint.format.safetensors_layout import KINDS, Shape, lay_out
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath, StorePath
from safepoint.storage.read_ahead import stream_ahead
from safepoint.storage.store import Content, Sink

MAX_FILE_BYTES = 50 << 30
"""The limit at which transformers begins another file of weights."""
_METADATA = {"format": "pt"}


class Run(NamedTuple):
    """A range of a weight's bytes that is contiguous in a file.

    Args:
        begin: the position of its first byte in the weight.
        num_bytes: its length.
        path: the file.
        offset: the position of its first byte in the file.
    """

    begin: int
    num_bytes: int
    path: ReadablePath
    offset: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight, and where its bytes are in a checkpoint.

    Args:
        shape: its name, type and sizes.
        runs: sorted by `begin`; they contain each byte of the weight once.
    """

    shape: Shape
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, name: str, dtype: str, sizes: tuple[int, ...], runs: Iterable[Run]) -> "StoredWeight":
        """Make a weight, and check that its ranges of bytes (`Run`) contain each of its bytes once.

        Args:
            name: the name of the weight.
            dtype: torch's name of the type, without `torch.`.
            sizes: the sizes of its dimensions.
            runs: the ranges of its bytes in files, in any order.

        Raises:
            CheckpointError: the name is invalid, safetensors has no such type, or bytes are missing or stored twice.
        """
        if type(name) is not str or not name.isprintable() or name == "__metadata__":
            raise CheckpointError(f"a weight cannot be called {name!r}")
        if dtype not in KINDS:
            raise CheckpointError(f"{name} is of type {dtype}, which safetensors does not have")
        shape = Shape(name, KINDS[dtype], sizes)
        ordered = tuple(sorted(run for run in runs if run.num_bytes))
        end = 0
        for run in ordered:
            if run.begin != end or run.num_bytes < 0 or run.offset < 0:
                raise CheckpointError(f"the stored parts of {name} overlap or leave a gap at byte {end}")
            end += run.num_bytes
        if end != shape.num_bytes:
            raise CheckpointError(f"the checkpoint has {end} of {shape.num_bytes} bytes of {name}")
        return cls(shape, ordered)


def gather(
    weights: Sequence[StoredWeight], *, max_file_bytes: int = MAX_FILE_BYTES, known: ReadRanges | None = None
) -> dict[str, Content]:
    """Lay out `model.safetensors`, or several files and their index.

    Args:
        weights: the weights of the whole model. Their paths must come from `safepoint.storage.browsing.browse`.
        max_file_bytes: the most bytes of tensors in one file. A larger tensor has a file of its own.
        known: the ranges of the checkpoint's files that were digested; None if the checkpoint has no digests.

    Returns:
        The content of each file, by its name. Reading a content raises StorageError if a file of the checkpoint is
        shorter than it should be, or cannot be read. It raises CheckpointError if a range has another digest than in
        `known`.
    """
    groups = _split(weights, max_file_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    files = {name: _content(group, known) for name, group in zip(names, groups, strict=True)}
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(weight.shape.num_bytes for weight in weights)},
            "weight_map": {
                weight.shape.name: name for name, group in zip(names, groups, strict=True) for weight in group
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files["model.safetensors.index.json"] = content_of(text.encode())
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


def _range_of(run: Run) -> tuple[str, int, int]:
    return cast("StorePath", run.path).key, run.offset, run.num_bytes


def _content(weights: Sequence[StoredWeight], known: ReadRanges | None) -> Content:
    layout = lay_out((weight.shape for weight in weights), _METADATA)
    by_name = {weight.shape.name: weight for weight in weights}

    def write_to(sink: Sink) -> None:
        sink(memoryview(layout.header))
        runs = [run for shape, _ in layout.places for run in by_name[shape.name].runs]
        if known is not None:
            sink = known.checked((_range_of(run) for run in runs), sink)
        stream_ahead((cast("StorePath", run.path).byte_range(run.offset, run.num_bytes) for run in runs), sink)

    return Content(size_bytes=layout.size_bytes, write_to=write_to)
