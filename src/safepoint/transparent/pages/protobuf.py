"""Reads the records in CRIU's files. A record is a length of 4 bytes, and then a protobuf message of this length.

Promises: malformed data raises ValueError. Not promised: that a message has the fields that CRIU writes.
"""

import struct
from collections.abc import Iterator

Fields = dict[int, list[int | bytes]]
"""The number of a field → its values: numbers, or bytes for texts, messages and fixed numbers."""
_MAGIC_BYTES = 8
"""A file begins with two magic numbers."""
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 32
_NUMBER, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""The kinds of fields in protobuf. Those in `_FIXED` have a fixed number of bytes."""
_MOST_VARINT_BYTES = 10


def records_in(data: bytes, *, most_bytes: int = _MOST_BYTES) -> Iterator[bytes]:
    """The messages in a file.

    Args:
        data: the whole file.
        most_bytes: a longer message is refused.

    Raises:
        ValueError: the file is cut off, or a message is too long.
    """
    position = _MAGIC_BYTES
    while position < len(data):
        begin = position + _LENGTH.size
        if begin > len(data):
            raise ValueError("it is cut off")
        (length,) = _LENGTH.unpack_from(data, position)
        position = begin + length
        if length > most_bytes:
            raise ValueError("a record is longer than a record can be")
        if position > len(data):
            raise ValueError("it is cut off")
        yield data[begin:position]


def fields_of(message: bytes) -> Fields:
    """The fields of a message.

    Raises:
        ValueError: the message is malformed.
    """
    found: Fields = {}
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == _NUMBER:
            value, position = _varint(message, position)
        else:
            if kind == _BYTES:
                length, position = _varint(message, position)
            elif kind in _FIXED:
                length = _FIXED[kind]
            else:
                raise ValueError(f"field {key >> 3} has the unknown kind {kind}")
            value, position = message[position : position + length], position + length
            if position > len(message):
                raise ValueError("a field is cut off")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number, and the position behind it."""
    value = 0
    for shift, byte in enumerate(message[position : position + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, position + shift + 1
    raise ValueError("a number is cut off or too large")
