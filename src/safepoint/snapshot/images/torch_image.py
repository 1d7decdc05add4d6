"""Composes in memory the bytes that `torch.save` would write to a file. These bytes are the image of the file.

Pickling hundreds of tensors takes longer than everything else at the end of a step. So the pickle of each value in
the outermost dictionary is kept. The pickle is used again if nothing in the value has changed except the content of
its tensors.
"""

import io
import pickle
import struct
from collections import OrderedDict
from typing import Any, NamedTuple, cast

import torch

from safepoint.snapshot.images.image import Image, Piece, is_plain
from safepoint.snapshot.images.torch_archive import PICKLE_BEGIN, PICKLE_END, StorageRecords, lay_out

_PROTOCOL = 2
_KEPT_BYTES = 16 << 20
"""If the pickle has more bytes, the image is not kept, but composed at each save. The pickle of 100,000
tensors has fewer bytes."""
_typed_storage: Any = torch.storage.TypedStorage
_torch: Any = torch
_rebuild: Any = _torch._utils._rebuild_tensor_v2
_storage_names: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()  # pyright: ignore
_location: Any = torch.serialization.location_tag


class UncomposableError(Exception):
    """The layout of the file cannot be computed before the tensors are copied, so torch has to write the file."""


class _Reference(NamedTuple):
    """Stands for a storage in the pickle."""

    persistent_id: tuple[Any, ...]


class _Entry:
    """What each save needs to know about a storage. These facts are read once."""

    __slots__ = ("address", "data", "device", "num_bytes", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.data: int = storage._cdata
        self.device: str = storage.device.type
        self.num_bytes: int = storage.nbytes()
        self.address: int = storage.data_ptr()


class _Storages:
    """The storages of one archive: each once, numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.entries: list[_Entry] = []
        self._are_borrowed = False

    def number(self, storage: Any) -> int:
        number = self.numbers.get(storage._cdata)
        return self.add(_Entry(storage)) if number is None else number

    def add(self, entry: _Entry) -> int:
        if entry.device not in {"cpu", "cuda"}:
            raise UncomposableError(f"a storage is on {entry.device}")
        self._make_own()
        number = self.numbers[entry.data] = len(self.entries)
        self.entries.append(entry)
        return number

    def borrow(self, before: "_Storages") -> bool:
        """Start with all storages of `before`. Storages that are added here later do not change `before`.

        Returns:
            False if this object has storages already; then nothing was done.
        """
        if self.entries:
            return False
        self.numbers, self.entries = before.numbers, before.entries
        self._are_borrowed = True
        return True

    def copy(self) -> "_Storages":
        """A copy. Storages that are added here later are not added to the copy."""
        copy = _Storages()
        copy.numbers, copy.entries = dict(self.numbers), list(self.entries)
        return copy

    def _make_own(self) -> None:
        if self._are_borrowed:
            self.numbers, self.entries = dict(self.numbers), list(self.entries)
            self._are_borrowed = False

    def take_back(self, count: int) -> None:
        """Remove all storages but the first `count`."""
        self._make_own()
        for entry in self.entries[count:]:
            del self.numbers[entry.data]
        del self.entries[count:]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._storages = storages
        self._references: dict[tuple[int, torch.dtype], _Reference] = {}

    def persistent_id(self, obj: Any) -> Any:
        kind = cast("Any", type(obj))
        if kind is _Reference:
            return obj.persistent_id
        if kind is _typed_storage:
            storage = obj._untyped_storage
            name, count = obj._pickle_storage_type(), obj._size()
            return ("storage", getattr(torch, name), str(self._storages.number(storage)), _location(storage), count)
        if kind is torch.UntypedStorage:
            return ("storage", torch.UntypedStorage, str(self._storages.number(obj)), _location(obj), obj.nbytes())
        return None

    def reducer_override(self, obj: Any) -> Any:
        # This has the same result as torch's own reduction of a plain tensor, and takes a third of the time.
        if type(obj) is not torch.Tensor or not is_plain(obj) or obj.__dict__ or obj._backward_hooks:
            return NotImplemented
        name = _storage_names.get(obj.dtype)
        if name is None:
            return NotImplemented
        storage: Any = obj.untyped_storage()
        number = self._storages.number(storage)
        reference = self._references.get((number, obj.dtype))
        if reference is None:
            count = storage.nbytes() // obj.element_size()
            identity = ("storage", getattr(torch, name), str(number), _location(storage), count)
            reference = self._references[number, obj.dtype] = _Reference(identity)
        arguments = (reference, obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad)
        return _rebuild, (*arguments, cast("OrderedDict[Any, Any]", OrderedDict()))


class _LoneTensor:
    """Stands for a contiguous tensor on the CPU that has a storage of its own."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        like = torch.empty(shape, dtype=dtype, device="meta")
        kind: Any = getattr(torch, _storage_names[dtype])
        reference = _Reference(("storage", kind, "0", "cpu", like.numel()))
        self._arguments = (reference, 0, shape, like.stride(), False, cast("OrderedDict[Any, Any]", OrderedDict()))

    def __reduce__(self) -> Any:
        return _rebuild, self._arguments


def pickle_lone_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor on the CPU whose data is the archive's first storage.

    Raises:
        UncomposableError: torch saves tensors of this type in another way.
    """
    if dtype not in _storage_names:
        raise UncomposableError(f"{dtype} is not known")
    buffer = io.BytesIO()
    _Pickler(buffer, _Storages()).dump(_LoneTensor(dtype, shape))
    return buffer.getvalue()


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


class _Seen:
    """A tensor as it was when it was pickled."""

    __slots__ = ("address", "entry", "meta", "number", "tensor")

    def __init__(self, tensor: torch.Tensor, storages: _Storages) -> None:
        self.tensor = tensor
        self.number = storages.number(tensor.untyped_storage())
        self.entry = storages.entries[self.number]
        # An empty view has the address 0, even if its storage is not empty. So the address would not show that the
        # storage has changed. No tensor has the address -1, so this value makes sure that the view is pickled again.
        self.address = tensor.data_ptr() or (-1 if self.entry.num_bytes else 0)
        self.meta = _meta(tensor)

    def is_still(self, tensor: torch.Tensor, storages: _Storages) -> bool:
        """Whether `tensor` would be pickled to the same bytes.

        The call may add the storage of `tensor` to `storages`, even if the answer is False.
        """
        # `_meta` is compared even if `tensor` is the same object, because the shape, the strides and requires_grad of
        # a tensor can be changed in place.
        if tensor.data_ptr() != self.address or _meta(tensor) != self.meta:
            return False
        if tensor is not self.tensor:
            storage: Any = tensor.untyped_storage()
            if type(tensor) is not type(self.tensor):
                return False
            if storage._cdata != self.entry.data:
                entry = _Entry(storage)
                if (entry.num_bytes, entry.device) != (self.entry.num_bytes, self.entry.device):
                    return False
                self.entry = entry
            self.tensor = tensor
        number = storages.numbers.get(self.entry.data)
        if number is None:
            number = storages.add(self.entry)
        return number == self.number


class _Chunk:
    """The pickle of one value, and the outline of the value: everything that the pickle depends on (`_outline`).

    If the value changes later, its pickle and its outline here stay as they were.
    """

    def __init__(self, value: Any, storages: _Storages) -> None:
        buffer = io.BytesIO()
        _Pickler(buffer, storages).dump(value)
        self.value = value
        self.storages = storages.copy()
        self.body = buffer.getvalue()[len(PICKLE_BEGIN) : -len(PICKLE_END)]
        outline: list[Any] | None = []
        if not _outline(value, outline):
            outline = None
        self._outline = outline and [
            _Seen(item, storages) if isinstance(item, torch.Tensor) else item for item in outline
        ]

    def is_still(self, value: Any, storages: _Storages) -> bool:
        """Whether `value` would be pickled to the same bytes."""
        if self._outline is None:
            return False
        outline: list[Any] = []
        if not _outline(value, outline) or len(outline) != len(self._outline):
            return False
        for seen, item in zip(self._outline, outline, strict=True):
            if type(seen) is _Seen:
                if not isinstance(item, torch.Tensor) or not seen.is_still(item, storages):
                    return False
            elif seen is not item and not _are_equal(seen, item):
                return False
        return True


def _are_equal(seen: Any, item: Any) -> bool:
    return type(seen) is type(item) and seen == item and (seen != 0 or repr(seen) == repr(item))  # 0.0 is not -0.0


_SCALARS = {str, int, float, bool, bytes, type(None)}


def _outline(value: Any, found: list[Any]) -> bool:
    """Add to `found` everything that the pickle of `value` depends on; False when `value` is not plain."""
    kind = cast("Any", type(value))
    if kind in {torch.Tensor, torch.nn.Parameter}:
        found.append(value)
        return is_plain(value) and not value.__dict__
    if kind in {dict, OrderedDict}:
        found.extend((kind, len(value)))
        attributes = getattr(value, "__dict__", None)
        if attributes and not _outline(attributes, found):
            return False
        found.extend(value)
        keys: Any = value
        return all(type(key) in _SCALARS for key in keys) and all(_outline(item, found) for item in value.values())
    if kind in {list, tuple}:
        found.extend((kind, len(value)))
        # An optimizer's state has long lists of numbers: the indices of the parameters. This check is fast for them.
        if all(type(item) in _SCALARS for item in value):
            found.extend(value)
            return True
        return all(_outline(item, found) for item in value)
    found.append(value)
    return kind in _SCALARS


class TorchImages:
    """Composes the image of one file at each save, and remembers its last pickle.

    Args:
        path: see `Image`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._prefix = path.rsplit("/", 1)[-1].rsplit(".", 1)[0] or "archive"
        self._chunks: dict[str, _Chunk] = {}
        self._trusts = False
        self._entries: list[_Entry] = []
        self._records = StorageRecords(self._prefix, [])
        self._pieces: tuple[Piece, ...] = ()
        self._pickled = b""
        self._image: Image | None = None

    def compose(self, value: Any, *, trusts: bool = False) -> Image:
        """The image of what `torch.save(value, path)` writes now.

        Args:
            value: what to save.
            trusts: if True, the caller guarantees something about dictionaries that were also passed in the last
                call: nothing in them has changed, except the content of tensors. Their last pickle may then be used
                again without a comparison. This applies to `value` and to each dictionary that is a value in it.

        Raises:
            UncomposableError: a storage is on a device that is neither `cpu` nor `cuda`.
            Exception: any error of pickling.
        """
        storages = _Storages()
        self._trusts = trusts
        pickled = self._pickle(value, storages)
        if storages.entries != self._entries:
            self._image = None
            self._records = StorageRecords(self._prefix, [entry.num_bytes for entry in storages.entries])
            self._pieces = tuple(
                Piece(place, entry.num_bytes, entry.address, entry.address, entry.storage, entry.device)
                for place, entry in zip(self._records.places, storages.entries, strict=True)
                if entry.num_bytes
            )
        self._entries = storages.entries
        if self._image is not None and pickled == self._pickled:
            return self._image
        layout = lay_out(self._records, PICKLE_BEGIN + pickled + PICKLE_END)
        image = Image(
            path=self.path,
            size_bytes=layout.size_bytes,
            literals=layout.literals,
            fixed=self._records.literals,
            pieces=self._pieces,
            archives=(layout.archive,),
        )
        # A large pickle contains data that is not in tensors. `_chunks` already holds this data. The whole pickle
        # would be a second copy. The literals of the image contain the pickle, so the image would be a third copy. So
        # neither the pickle nor the image is kept.
        is_kept = len(pickled) <= _KEPT_BYTES
        self._pickled, self._image = (pickled, image) if is_kept else (b"", None)
        return image

    def _pickle(self, value: Any, storages: _Storages) -> bytes:
        if type(value) is not dict or not all(type(key) is str for key in cast("dict[Any, Any]", value)):
            return self._chunk("", value, storages)
        mapping = cast("dict[str, Any]", value)
        # Each value is pickled on its own and refers to nothing outside itself, so the pickles can be joined.
        parts = [b"}("]
        for key, item in mapping.items():
            text = key.encode("utf-8", "surrogatepass")
            parts += [b"X", struct.pack("<I", len(text)), text, self._chunk(key, item, storages)]
        parts.append(b"u")
        return b"".join(parts)

    def _chunk(self, key: str, value: Any, storages: _Storages) -> bytes:
        chunk = self._chunks.get(key)
        if chunk is not None:
            count = len(storages.entries)
            if self._trusts and chunk.value is value and isinstance(value, dict) and storages.borrow(chunk.storages):
                return chunk.body
            if chunk.is_still(value, storages):
                chunk.value = value
                return chunk.body
            storages.take_back(count)
        chunk = self._chunks[key] = _Chunk(value, storages)
        return chunk.body
