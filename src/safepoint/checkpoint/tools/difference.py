"""The differences between two checkpoints: their settings, their files, and the tensors in them.

Tensors are compared in safetensors files, whose header names them; nothing is unpickled.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from safepoint.checkpoint.format.digest import Digester
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.tools.inventory import Inventory, Item
from safepoint.errors import CheckpointError, StorageError
from safepoint.foundation.units import ByteCounter
from safepoint.storage.store import Store

_SETTINGS = (
    *("run_id", "attempt", "step", "epoch", "trigger", "world_size", "global_batch", "gradient_accumulation"),
    *("samples_seen", "strategy", "zero_stage", "created"),
)
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own library."""
_BLOCK_BYTES = 16 << 20
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as a safetensors header describes it.

    Args:
        dtype: the format's name for it, such as `F32`.
        shape: its sizes.
        start: where its bytes begin, in the file.
        size_bytes: how many there are.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that is not the same.

    Args:
        name: a setting, a path, or `path: tensor`.
        before: as text; empty when it was not there.
        after: likewise.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changed.

    Args:
        settings: of the manifests, versions and metrics included.
        files: that came, went, or have other bytes.
        tensors: that came, went, or have another type, shape or, when contents were read, content.
    """

    settings: tuple[Change, ...]
    files: tuple[Change, ...]
    tensors: tuple[Change, ...]


def compare(
    before: tuple[Inventory, Item],
    after: tuple[Inventory, Item],
    *,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Say what changed from `before` to `after`.

    Args:
        before: where it is, and which.
        after: likewise.
        deep: also read the tensors of files that are not the same, and say which of them changed.
        progress: receives the bytes read so far, and the bytes in all.

    Raises:
        CheckpointError: one of them is not complete, or a file is no safetensors file.
        StorageError: a store cannot be read.
    """
    old, new = _manifest_of(before[1]), _manifest_of(after[1])
    old_files = {entry.path: entry for entry in old.files}
    new_files = {entry.path: entry for entry in new.files}
    files: list[Change] = []
    tensors: list[Change] = []
    changed: list[str] = []
    for path in sorted(old_files.keys() | new_files.keys()):
        was, now = old_files.get(path), new_files.get(path)
        if was != now:
            files.append(Change(name=path, before=_text_of(was), after=_text_of(now)))
            if was is not None and now is not None and path.endswith(_SUFFIX):
                changed.append(path)
    total_bytes = sum(old_files[path].size_bytes + new_files[path].size_bytes for path in changed) if deep else 0
    counter = ByteCounter(progress, total_bytes)
    for path in changed:
        was, now = _TensorFile(before, path), _TensorFile(after, path)
        tensors += _compare_tensors(path, was, now, counter.add if deep else None)
    return Difference(
        settings=tuple(_compare_mappings(_settings_of(old), _settings_of(new))),
        files=tuple(files),
        tensors=tuple(tensors),
    )


def _manifest_of(item: Item) -> Manifest:
    if item.manifest is None or not item.is_complete:
        raise CheckpointError(
            f"{item.where} is not a complete checkpoint, and cannot be compared",
            hint="see `safepoint checkpoints verify`",
        )
    return item.manifest


def _text_of(entry: FileEntry | None) -> str:
    return "" if entry is None else f"{entry.size_bytes} bytes, {entry.digest}"


def _settings_of(manifest: Manifest) -> dict[str, str]:
    values = {name: getattr(manifest, name) for name in _SETTINGS}
    settings = {name: str(value) for name, value in values.items() if value is not None}
    settings |= {f"libraries.{name}": version for name, version in manifest.libraries.items()}
    return settings | {f"metrics.{name}": str(value) for name, value in manifest.metrics.items()}


def _compare_mappings(before: Mapping[str, str], after: Mapping[str, str], prefix: str = "") -> list[Change]:
    names = [*before, *(name for name in after if name not in before)]
    return [
        Change(name=f"{prefix}{name}", before=before.get(name, ""), after=after.get(name, ""))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _compare_tensors(
    path: str, before: "_TensorFile", after: "_TensorFile", advance: Callable[[int], None] | None
) -> list[Change]:
    described = [{name: str(tensor) for name, tensor in file.tensors.items()} for file in (before, after)]
    changes = _compare_mappings(described[0], described[1], f"{path}: ")
    if advance is None:
        return changes
    for name, tensor in before.tensors.items():
        digests = [before.digest(tensor, advance)]
        if name in after.tensors:
            digests.append(after.digest(after.tensors[name], advance))
        if len(digests) == 2 and described[0][name] == described[1][name] and digests[0] != digests[1]:
            changes.append(Change(name=f"{path}: {name}", before=digests[0], after=digests[1]))
    return changes


class _TensorFile:
    """A safetensors file in a store, read by ranges."""

    def __init__(self, place: tuple[Inventory, Item], path: str) -> None:
        inventory, item = place
        self._store: Store = inventory.store
        self._key = f"{item.prefix}/{path}"
        self.tensors: dict[str, Tensor] = {}
        """By name, as the header lists them."""
        try:
            self.tensors = _read_header(self._store, self._key)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StorageError) as error:
            raise CheckpointError(f"{item.where}/{path} is no safetensors file: {error}") from error

    def digest(self, tensor: Tensor, advance: Callable[[int], None]) -> str:
        digester = Digester()
        end = tensor.start + tensor.size_bytes
        for start in range(tensor.start, end, _BLOCK_BYTES):
            data = self._store.read(self._key, start=start, length=min(_BLOCK_BYTES, end - start))
            digester.update(data)
            advance(len(data))
        return digester.digest


def _read_header(store: Store, key: str) -> dict[str, Tensor]:
    size_bytes = store.stat(key).size_bytes
    length = int.from_bytes(store.read(key, length=8), "little")
    if length > min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(store.read(key, start=8, length=length)))
    return _tensors(header, data_start=8 + length, file_bytes=size_bytes)


def _tensors(header: Any, *, data_start: int, file_bytes: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, record in cast("dict[str, dict[str, Any]]", header).items():
        if name == "__metadata__":
            continue
        begin, end = record["data_offsets"]
        shape = tuple(int(size) for size in record["shape"])
        if not 0 <= begin <= end <= file_bytes - data_start or math.prod(shape) < 0:
            raise ValueError(f"the tensor {name!r} lies outside the file")
        found[name] = Tensor(
            dtype=str(record["dtype"]), shape=shape, start=data_start + begin, size_bytes=end - begin
        )
    return found
