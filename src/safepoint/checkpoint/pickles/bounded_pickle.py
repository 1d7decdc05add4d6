"""An unpickler that limits a pickle's instructions, keys of dictionaries and sets, and states of objects.

A pickle of a few hundred bytes can make Python hash a key for hours, or fill the memory. This unpickler is written in
Python, because Python's unpickler in C cannot check an instruction before the instruction is carried out.

The limits rise with the size of the pickle, so that the metadata of a checkpoint with millions of parts can be read.
The time and the memory that a pickle of N bytes takes are at most proportional to N.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, cast

from safepoint.errors import CheckpointError

_MAX_INSTRUCTIONS = 50_000_000
_INSTRUCTIONS_PER_BYTE = 0.75
"""A pickle may have this many instructions per byte, if that is more than `_MAX_INSTRUCTIONS`. The metadata of DCP
have 0.48: 68 instructions and 143 bytes for each part of a tensor."""
_MAX_SETS = 100_000
_MAX_VALUES_IN_KEYS = 20_000_000
_VALUES_IN_KEYS_PER_BYTE = 0.125
"""How many values the tuples of all keys together may have: `_MAX_VALUES_IN_KEYS`, or this many per byte if that is
more. One long tuple may be the key of many dictionaries. The metadata of DCP have a value per dimension of a part."""
_PYTHON_PICKLE: Any = pickle
_BASE: Any = _PYTHON_PICKLE._Unpickler
_INSTRUCTIONS: dict[int, Any] = _PYTHON_PICKLE._Unpickler.dispatch
_REFUSED = {code[0] for code in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER)}
"""Instructions that refer to objects outside the file, or that allocate memory before the bytes are read."""
PLAIN_KEYS = {str, bytes, float, bool, type(None)}
"""The types of keys that are always quick to hash. The keys of type `int` are checked separately, because a large
number takes long to hash."""


def _no_parts(key: Any) -> None:
    return None


class KeyLimits:
    """Refuses keys of dictionaries and sets that take long to hash, to compare or to print.

    Args:
        most_tuples: how many tuples all keys together may have.
        most_parts: how many values, at any depth, one key may have.
        number_bits: how many bits a whole number in a key may have.
        is_plain: returns whether a key is allowed. It is called for keys that are neither tuples nor whole numbers,
            and whose type is not in `PLAIN_KEYS`.
        parts_of: receives a key that `is_plain` allows, and returns the values from which the key's hash is computed;
            None if there are none.
        size_bytes: the size of the pickle.
    """

    def __init__(
        self,
        *,
        most_tuples: int,
        most_parts: int,
        number_bits: int,
        is_plain: Callable[[Any], bool],
        parts_of: Callable[[Any], tuple[Any, ...] | None] = _no_parts,
        size_bytes: int = 0,
    ) -> None:
        self._values_left = max(_MAX_VALUES_IN_KEYS, int(size_bytes * _VALUES_IN_KEYS_PER_BYTE))
        self._tuples_left, self._most_parts, self._number_bits = most_tuples, most_parts, number_bits
        self._is_plain = is_plain
        self._parts_of = parts_of

    def check(self, key: Any) -> None:
        """Raise CheckpointError for a key that takes long to hash, to compare or to print."""
        if type(key) is str:
            return
        parts: list[Any] = [*(self._parts_of(key) or [key])]
        for number, part in enumerate(parts):
            is_large = number >= self._most_parts
            if isinstance(part, tuple):
                self._tuples_left -= 1
                inner = cast("tuple[Any, ...]", part)
                self._values_left -= len(inner)
                parts += inner[: self._most_parts + 1]
            elif type(part) is int:
                is_large |= part.bit_length() > self._number_bits
            elif type(part) not in PLAIN_KEYS and not self._is_plain(part):
                raise CheckpointError("a dictionary or a set has a key that is not a plain value")
            if is_large or min(self._tuples_left, self._values_left) < 0:
                raise CheckpointError(
                    "a dictionary or a set has a key that is too large, or too many keys are tuples"
                )


def size_of(file: BinaryIO) -> int:
    """The number of bytes from the file's position to its end. The position does not change."""
    place = file.tell()
    file.seek(0, io.SEEK_END)
    size_bytes = file.tell() - place
    file.seek(place)
    return size_bytes


class InstructionLimits:
    """Counts the instructions of a pickle, and the sets that they make.

    Args:
        size_bytes: the size of the pickle.
    """

    def __init__(self, size_bytes: int) -> None:
        self.most = max(_MAX_INSTRUCTIONS, int(size_bytes * _INSTRUCTIONS_PER_BYTE))
        self._left = self.most
        self._sets_left = _MAX_SETS

    @property
    def num_counted(self) -> int:
        """How many instructions were counted."""
        return self.most - self._left

    def count(self, code: int) -> None:
        """Count the next instruction, `code`. Raise CheckpointError if there are too many instructions or sets."""
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(f"a pickle has more than {self.most} instructions")
        if code == pickle.EMPTY_SET[0]:
            self._sets_left -= 1  # a set takes as much memory as a hundred instructions
            if self._sets_left < 0:
                raise CheckpointError(f"a pickle has more than {_MAX_SETS} sets")


class BoundedUnpickler(_BASE):
    """Python's unpickler with limits.

    Args:
        file: the pickle.
        keys: the limits of keys.
        has_state: called with an object and its state before the state is set. If it returns False, the pickle is
            refused.
    """

    def __init__(self, file: BinaryIO, *, keys: KeyLimits, has_state: Callable[[Any, Any], bool]) -> None:
        super().__init__(file)  # pyright: ignore[reportUnknownMemberType]
        self._limits = InstructionLimits(size_of(file))
        self.dispatch = _Instructions(self, self._limits, keys, has_state)

    @property
    def max_instructions(self) -> int:
        """How many instructions the pickle may have."""
        return self._limits.most

    @property
    def num_instructions(self) -> int:
        """How many instructions were carried out."""
        return self._limits.num_counted


class _Instructions:
    """The table of `pickle`'s instructions. It counts the instructions, and checks keys before pickle hashes them."""

    def __init__(
        self,
        unpickler: Any,
        limits: InstructionLimits,
        keys: KeyLimits,
        has_state: Callable[[Any, Any], bool],
    ) -> None:
        self._unpickler = unpickler
        self._limits, self._key_limits, self._has_state = limits, keys, has_state
        self._keys: dict[int, Callable[[], Iterable[Any]]] = {
            pickle.SETITEM[0]: lambda: unpickler.stack[-2:-1],
            pickle.SETITEMS[0]: lambda: unpickler.stack[::2],
            pickle.DICT[0]: lambda: unpickler.stack[::2],
            pickle.ADDITEMS[0]: lambda: unpickler.stack,
            pickle.FROZENSET[0]: lambda: unpickler.stack,
        }

    def __getitem__(self, code: int) -> Any:
        self._limits.count(code)
        if code in _REFUSED:
            raise CheckpointError("a pickle has an instruction that torch does not write")
        if code in self._keys:
            for key in self._keys[code]():
                self._key_limits.check(key)
        elif code == pickle.BUILD[0] and not self._has_state(*self._unpickler.stack[-2:]):
            raise CheckpointError("a pickle sets the state of an object that has no state")
        return _INSTRUCTIONS[code]
