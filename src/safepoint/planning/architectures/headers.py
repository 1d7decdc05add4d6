"""Reads the JSON of a model: its settings, the headers of its safetensors files, and their index.

No tensor is read; pipes and devices are refused.
"""

import os
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.format.safetensors_layout import LENGTH_BYTES, MAX_HEADER_BYTES
from safepoint.errors import UsageError
from safepoint.foundation.bounded_json import parse_object, read_object
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.planning.architectures.fields import Tensor

_MAX_INDEX_BYTES = 64 << 20
MAX_CONFIG_BYTES = 4 << 20
DOWNLOAD_HINT = "download the model again, or pass its config.json instead of the folder"


def _real_path(path: Path) -> Path:
    """The file to which a path leads, through links.

    Raises:
        OSError: there is no such file, or the links lead in a circle.
    """
    return Path(os.path.realpath(path, strict=True))


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file with settings, such as `config.json`. Python's `NaN` and `Infinity` may occur in it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such an object, or has more than `MAX_CONFIG_BYTES`.
    """
    return read_object(_real_path(path), max_bytes=MAX_CONFIG_BYTES, constant=float)


def files_in_index(path: Path) -> set[str]:
    """The names of the files in `model.safetensors.index.json`.

    Raises:
        UsageError: the file is not an index.
    """
    try:
        names = read_object(_real_path(path), max_bytes=_MAX_INDEX_BYTES, constant=float).get("weight_map")
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}; nothing was computed", hint=DOWNLOAD_HINT) from error
    found: list[Any] = list(cast("dict[str, Any]", names).values()) if isinstance(names, dict) else [None]
    if not all(isinstance(one, str) for one in found):
        raise UsageError(
            f"{path} is damaged: weight_map does not name the files; nothing was computed", hint=DOWNLOAD_HINT
        )
    return set(found)


def header_of(path: Path) -> tuple[list[tuple[Tensor, str]], int]:
    """The tensors that the header of a safetensors file names, with their types; and the minimum size of the file.

    Raises:
        UsageError: the file is not a safetensors file.
    """
    try:
        with open_regular(_real_path(path)) as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            # One byte more than the limit, so that `parse_object` refuses a header that is too large.
            wanted = min(length, MAX_HEADER_BYTES + 1)
            data = file.read(wanted)
        # A header that is cut off is not parsed: its beginning may be a JSON object by itself.
        header = parse_object(data if len(data) == wanted else b"", max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        found = [_stored(name, record) for name, record in header.items()]
        ends = [_end_of(name, record) for name, record in header.items()]
    except ValueError as error:
        raise UsageError(
            f"{path} is not a safetensors file, or is damaged: {error}; nothing was computed",
            hint=DOWNLOAD_HINT,
        ) from error
    return found, LENGTH_BYTES + length + max(ends, default=0)


def _stored(name: str, record: Any) -> tuple[Tensor, str]:
    fields = cast("dict[str, Any]", record if isinstance(record, dict) else {})
    sizes, kind = fields.get("shape"), fields.get("dtype")
    if not isinstance(sizes, list) or not isinstance(kind, str):
        raise ValueError(f"it does not describe the tensor {name[:80]!r}")  # noqa: TRY004
    numbers = cast("list[Any]", sizes)
    if len(numbers) > 64 or not all(type(one) is int and 0 <= one < 1 << 60 for one in numbers):
        raise ValueError(f"the shape of the tensor {name[:80]!r} is invalid")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of the tensor {name[:80]!r} is not Unicode text") from error
    return Tensor(name, tuple(numbers)), kind


def _end_of(name: str, record: dict[str, Any]) -> int:
    """The end of a tensor's data, in bytes after the header."""
    offsets = cast("list[Any]", record.get("data_offsets"))
    if type(offsets) is not list or [type(one) for one in offsets] != [int, int]:
        raise ValueError(f"it does not say where the tensor {name[:80]!r} is")
    return offsets[1]
