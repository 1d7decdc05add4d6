"""The differences between two checkpoints: their settings, their files, and the tensors in them.

Tensors are compared only in safetensors files, because the header of such a file names its tensors. Nothing is
unpickled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from safepoint.checkpoint.format.digest import FileDigester
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.format.safetensors_layout import LENGTH_BYTES, MAX_HEADER_BYTES
from safepoint.checkpoint.tools.inventory import Inventory, Item
from safepoint.errors import CheckpointError
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.units import ByteCounter

_SETTINGS = (
    *("run_id", "attempt", "step", "epoch", "trigger", "world_size", "global_batch", "gradient_accumulation"),
    *("samples_seen", "strategy", "zero_stage", "created"),
)
_BLOCK_BYTES = 16 << 20
_SUFFIX = ".safetensors"


class _Tensor(NamedTuple):
    """A tensor as a safetensors header describes it.

    Args:
        form: its type and sizes, such as `F32 [3, 4]`.
        start: where its bytes begin in the file.
        size_bytes: the number of its bytes.
    """

    form: str
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two checkpoints.

    Args:
        name: a setting, a path, or `path: tensor`.
        before: the earlier value; empty when there was none.
        after: the later value; empty when there is none.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All differences between two checkpoints.

    Args:
        settings: fields of the manifests that differ, including the versions of libraries and the metrics.
        files: added, removed and changed files.
        tensors: tensors that were added or removed, or that have another type or shape, in the safetensors files that
            both checkpoints have. With `deep`, also tensors with another content.
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
    """The differences of two checkpoints.

    Args:
        before: an inventory and a checkpoint in it.
        after: an inventory and a checkpoint in it.
        deep: whether to also read the tensors of changed files, and compare their contents.
        progress: receives the bytes read so far, and the bytes in all.

    Raises:
        CheckpointError: one of the checkpoints is not complete, or a file is not a valid safetensors file.
        StorageError: a store cannot be read.
    """
    old, new = (inventory.complete_manifest(item) for inventory, item in (before, after))
    old_files = {entry.path: entry for entry in old.files}
    new_files = {entry.path: entry for entry in new.files}
    paths = sorted(old_files.keys() | new_files.keys())
    changed = [path for path in paths if old_files.get(path) != new_files.get(path)]
    both = [path for path in changed if path.endswith(_SUFFIX) and path in old_files and path in new_files]
    total_bytes = sum(old_files[path].size_bytes + new_files[path].size_bytes for path in both) if deep else 0
    counter = ByteCounter(progress, total_bytes)
    tensors: list[Change] = []
    for path in both:
        was, now = _TensorFile(before, path), _TensorFile(after, path)
        tensors += _compare_tensors(path, was, now, counter.add if deep else None)
    return Difference(
        settings=tuple(_compare_mappings(_settings_of(old), _settings_of(new))),
        files=tuple(
            Change(name=path, before=_text_of(old_files.get(path)), after=_text_of(new_files.get(path)))
            for path in changed
        ),
        tensors=tuple(tensors),
    )


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
    forms = [{name: tensor.form for name, tensor in file.tensors.items()} for file in (before, after)]
    changes = _compare_mappings(forms[0], forms[1], f"{path}: ")
    if advance is not None:
        same = [name for name in before.tensors if forms[0][name] == forms[1].get(name)]
        digests = [{name: file.digest(file.tensors[name], advance) for name in same} for file in (before, after)]
        changes += _compare_mappings(digests[0], digests[1], f"{path}: ")
    return changes


class _TensorFile:
    """A safetensors file in a store, read by ranges."""

    def __init__(self, place: tuple[Inventory, Item], path: str) -> None:
        inventory, item = place
        self._store, self._key = inventory.store, f"{item.prefix}/{path}"
        try:
            self.tensors = self._read_header()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{item.where}/{path} is not a valid safetensors file: {error}") from error

    def _read_header(self) -> dict[str, _Tensor]:
        """The tensors by name, as the header lists them."""
        size_bytes = self._store.stat(self._key).size_bytes
        if size_bytes < LENGTH_BYTES:
            raise ValueError(f"it has {size_bytes} bytes, which is too short for the length of a header")
        length = int.from_bytes(self._store.read(self._key, length=LENGTH_BYTES), "little")
        if length > size_bytes - LENGTH_BYTES:
            raise ValueError("its header is longer than the file")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length:,} bytes, and the format allows {MAX_HEADER_BYTES:,}")
        data = bytes(self._store.read(self._key, start=LENGTH_BYTES, length=length))
        header: Any = parse_object(data, max_bytes=MAX_HEADER_BYTES)
        header.pop("__metadata__", None)
        found: dict[str, _Tensor] = {}
        for name, record in header.items():
            begin, end = record["data_offsets"]
            sizes, dtype = list(record["shape"]), record["dtype"]
            if type(dtype) is not str or not all(type(number) is int for number in (begin, end, *sizes)):
                raise ValueError(f"the header has an invalid entry for the tensor {name!r}")
            if not 0 <= begin <= end <= size_bytes - LENGTH_BYTES - length:
                raise ValueError(f"the tensor {name!r} is outside the file")
            found[name] = _Tensor(f"{dtype} {sizes}", LENGTH_BYTES + length + begin, end - begin)
        if sum(tensor.size_bytes for tensor in found.values()) > size_bytes:
            raise ValueError("its tensors overlap")
        return found

    def digest(self, tensor: _Tensor, advance: Callable[[int], None]) -> str:
        digester = FileDigester()
        end = tensor.start + tensor.size_bytes
        for start in range(tensor.start, end, _BLOCK_BYTES):
            data = self._store.read(self._key, start=start, length=min(_BLOCK_BYTES, end - start))
            digester.update(data)
            advance(len(data))
        return digester.result().digest
