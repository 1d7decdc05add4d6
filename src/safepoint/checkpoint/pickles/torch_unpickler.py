"""torch's restricted unpickler (`weights_only=True`), with checks of its calls and of the keys that it hashes.

torch restricts which functions a pickle calls, but not the arguments of the calls. For example,
`torch.FloatTensor(20000)` returns memory that this process has freed, and the next checkpoint would contain this
memory. Some functions compute with all elements of their tensors, and a tensor of a few bytes in the file may state
any number of elements. And torch before 2.10 does not check the size that the pickle states for a storage: it would
read and write the memory behind the storage.
"""

import codecs
import collections
import contextlib
import enum
import math
import pickle
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import _weights_only_unpickler as restricted

from safepoint.checkpoint.pickles.bounded_pickle import InstructionLimits, KeyLimits

_LENGTH = -1
"""In `_ARGUMENTS`: the size of this argument, in bytes, is the value of the argument before it."""
_ARGUMENTS: dict[int, tuple[int, ...]] = {
    pickle.BININT[0]: (4,),
    pickle.BININT1[0]: (1,),
    pickle.BININT2[0]: (2,),
    pickle.BINFLOAT[0]: (8,),
    pickle.BINUNICODE[0]: (4, _LENGTH),
    pickle.SHORT_BINSTRING[0]: (1, _LENGTH),
    pickle.LONG1[0]: (1, _LENGTH),
    pickle.BINGET[0]: (1,),
    pickle.LONG_BINGET[0]: (4,),
    pickle.BINPUT[0]: (1,),
    pickle.LONG_BINPUT[0]: (4,),
    pickle.PROTO[0]: (1,),
}
"""Instruction → the sizes of the arguments that torch's unpickler reads after it.

GLOBAL is not listed: its arguments are lines, which torch reads with `readline`."""
_WITHOUT_ARGUMENTS = {
    code[0]
    for code in (
        *(pickle.GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID, pickle.STOP, pickle.MARK),
        *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.NONE, pickle.NEWTRUE),
        *(pickle.NEWFALSE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_TUPLE),
        *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
    )
}
# The limits are higher than the needs of a script's state, such as 128-bit hashes or the tokens of a text as keys.
# With lower limits, a run might not be able to load its own checkpoints.
_MOST_TUPLES = 100_000
_MOST_PARTS = 100_000
_NUMBER_BITS = 2048
_ENCODINGS = {"latin1", "latin-1", "utf-8", "utf8", "ascii"}
"""The encodings for which pickle writes `_codecs.encode`. With some other encodings the call takes very long."""
_NOT_CALLED = {
    id(kind)
    for kind in (
        torch.Tensor,
        torch.storage.UntypedStorage,
        torch.storage.TypedStorage,
        *cast("Any", torch)._tensor_classes,
    )
}
"""Types that `torch.save` names but does not call. A call with a size returns memory that is not initialised."""
_REBUILDING: Any = cast("Any", torch)._utils
_COMPUTING = {
    id(getattr(_REBUILDING, f"_rebuild_{name}"))
    for name in ("sparse_tensor", "nested_tensor", "qtensor", "device_tensor_from_cpu_tensor")
}
"""Functions that copy or compare all elements of the tensors among their arguments, before the loaded value can be
checked."""
_MOST_COMPUTED_BYTES = 64 << 20
_MOST_USES = 8
"""The tensors for the functions in `_COMPUTING` may have 64 MiB together or, if that is more, eight times the size of
the file."""
_MOST_DIMENSIONS = 64
_COLLECTIONS = {id(kind) for kind in (set, collections.Counter, collections.OrderedDict)}
_REBUILD_FROM_TYPE: Any = cast("Any", torch)._tensor._rebuild_from_type_v2

_PICKLE = "data.pkl"
"""The name of the record with the pickle of an archive."""
_this_thread = threading.local()
"""Its attribute `sizes` has the sizes of the records of the archive that the thread reads; see `records_of`."""


class CheckedUnpickler(restricted.Unpickler):
    """The unpickler of this module, which replaces `torch._weights_only_unpickler.Unpickler`.

    torch reads an instruction, and then its arguments, with `read`. So `read` can distinguish the two, and checks the
    stack before an instruction is carried out.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)  # pyright: ignore[reportUnknownMemberType]
        self._read: Callable[[int], bytes] = file.read
        # torch set the attribute `read` to `file.read`, which hides the method `read` of this class, so the attribute
        # is deleted. It is not set to the method, which would make a reference cycle: all tensors would stay in
        # memory until gc runs.
        del self.__dict__["read"]
        self._arguments: list[int] = []
        self._argument = b""
        self._sizes = getattr(_this_thread, "sizes", None)
        self._limits = InstructionLimits(0 if self._sizes is None else self._sizes.get(_PICKLE, 0))
        self._computed_bytes_left = (
            math.inf if self._sizes is None else max(_MOST_COMPUTED_BYTES, _MOST_USES * sum(self._sizes.values()))
        )
        self._keys = KeyLimits(
            most_tuples=_MOST_TUPLES,
            most_parts=_MOST_PARTS,
            number_bits=_NUMBER_BITS,
            is_plain=lambda key: not isinstance(key, frozenset),
        )

    def read(self, size: int) -> bytes:
        """Read an instruction, which is checked, or one of its arguments."""
        data = self._read(size)
        if not self._arguments:
            if size != 1:
                raise pickle.UnpicklingError("this release of torch reads pickles in a way that cannot be checked")
            if data:
                self._check(data[0])
                self._arguments = [*_ARGUMENTS.get(data[0], ())]
            return data
        expected = self._arguments.pop(0)
        expected = int.from_bytes(self._argument, "little") if expected == _LENGTH else expected
        if size != expected:
            raise pickle.UnpicklingError("this release of torch reads pickles in a way that cannot be checked")
        self._argument = data
        return data

    def _check(self, code: int) -> None:
        """Raise an error if the next instruction must not be carried out."""
        self._limits.count(code)
        stack: list[Any] = self.stack
        if code not in _ARGUMENTS and code not in _WITHOUT_ARGUMENTS:
            raise pickle.UnpicklingError(f"unknown instruction {code}")
        if code == pickle.SETITEM[0]:
            self._check_target(stack[-3])
            self._keys.check(stack[-2])
        elif code == pickle.SETITEMS[0]:
            metastack: Any = cast("Any", self).metastack
            self._check_target(metastack[-1][-1])
            for key in stack[::2]:
                self._keys.check(key)
        elif code == pickle.BINPERSID[0]:
            self._check_storage(stack[-1])
        elif code in {pickle.REDUCE[0], pickle.NEWOBJ[0]}:
            self._check_call(stack[-2], stack[-1])
        elif code == pickle.BUILD[0] and isinstance(stack[-2], torch.Tensor | enum.Enum):
            # Refused, because the state of a tensor may enlarge the tensor's storage, and because a change of a
            # member of an enum would affect the whole process.
            raise pickle.UnpicklingError(
                f"the pickle sets the state of a {type(stack[-2]).__name__}, which is not allowed"
            )

    def _check_target(self, target: Any) -> None:
        # Otherwise, a pickle could write to the storage of a tensor. The script may have allowed subclasses of `dict`
        # with `torch.serialization.add_safe_globals`; torch from 2.10 on refuses their items itself.
        if not isinstance(target, dict):
            kind = type(target).__name__
            raise pickle.UnpicklingError(f"the pickle sets an item of a {kind}, which is not allowed")

    def _check_storage(self, identity: Any) -> None:
        """Refuse a storage that is larger than its record in the archive."""
        if self._sizes is None:
            return
        _, kind, key, _, count = identity
        size_bytes = count * (1 if kind is torch.UntypedStorage else kind.dtype.itemsize)
        if size_bytes > self._sizes[f"data/{_text(key).lower()}"]:
            raise pickle.UnpicklingError("a storage is larger than its record")

    def _check_call(self, function: Any, arguments: Any) -> None:
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("the pickle calls a function with arguments that are not a tuple")
        values = cast("tuple[Any, ...]", arguments)
        if id(function) in _NOT_CALLED:
            raise pickle.UnpicklingError(f"the pickle calls {function}, which is not allowed")
        if function is torch.nn.Parameter and not (values and isinstance(values[0], torch.Tensor)):
            raise pickle.UnpicklingError("the pickle makes a Parameter of something other than a tensor")
        if function is bytearray and not all(isinstance(value, bytes | str | list) for value in values):
            raise pickle.UnpicklingError("the pickle makes a bytearray of something other than bytes")
        if function is torch.Size and not all(isinstance(value, tuple | list) for value in values):
            raise pickle.UnpicklingError("the pickle makes a shape of something other than numbers")
        is_encoded = function is codecs.encode or (function is bytearray and len(values) > 1)
        if is_encoded and (len(values) != 2 or values[1] not in _ENCODINGS):
            raise pickle.UnpicklingError(
                f"the pickle encodes a text, but not with one of {', '.join(sorted(_ENCODINGS))}"
            )
        # This function calls its first argument, with its third argument.
        if function is _REBUILD_FROM_TYPE and len(values) > 2:
            self._check_call(values[0], values[2])
        if id(function) in _COMPUTING:
            self._count_elements(values)
        if id(function) in _COLLECTIONS:
            for value in values:
                self._check_items(function, value)

    def _count_elements(self, values: tuple[Any, ...]) -> None:
        """Count the bytes of the tensors among the arguments of a function.

        torch writes tensors, numbers, and tuples of these. It would make a tensor of a list or of a nested tuple, and
        one list may be in many places.
        """
        parts: list[Any] = []
        for value in values:
            parts += cast("tuple[Any, ...]", value) if type(value) is tuple else (value,)
        for part in parts:
            if isinstance(part, torch.Tensor):
                self._computed_bytes_left -= part.numel() * part.element_size()
            elif isinstance(part, tuple):
                sizes = cast("tuple[Any, ...]", part)
                self._computed_bytes_left -= len(sizes)
                if not all(type(size) is int for size in sizes[:_MOST_DIMENSIONS]) or len(sizes) > _MOST_DIMENSIONS:
                    raise pickle.UnpicklingError("the pickle makes a tensor of a nested tuple")
            elif isinstance(part, list):
                raise pickle.UnpicklingError("the pickle makes a tensor of a list")
        if self._computed_bytes_left < 0:
            raise pickle.UnpicklingError("the tensors are much larger than the data that the file stores for them")

    def _check_items(self, kind: Any, items: Any) -> None:
        """Check the values from which a set or a dictionary is made."""
        if isinstance(items, dict | set):  # the keys of `items` were checked when the pickle made it
            return
        if not isinstance(items, list | tuple):
            raise pickle.UnpicklingError(f"the pickle makes a {kind.__name__} of something other than a list")
        for item in cast("list[Any]", items):
            if kind is collections.OrderedDict and isinstance(item, list | tuple):
                for key in cast("list[Any]", item)[:1]:
                    self._keys.check(key)
            else:
                self._keys.check(item)


def _text(key: Any) -> str:
    return key.decode("ascii") if isinstance(key, bytes) else key


@contextlib.contextmanager
def records_of(sizes: Mapping[str, int]) -> Generator[None]:
    """While the block runs, this thread reads one archive, whose records have these sizes; see `check_records`.

    Other threads may load their own files at the same time: torch has one unpickler for all threads.
    """
    before = getattr(_this_thread, "sizes", None)
    _this_thread.sizes = sizes
    try:
        yield
    finally:
        _this_thread.sizes = before
