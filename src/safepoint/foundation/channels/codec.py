"""Frozen dataclasses as JSON objects, read strictly.

A field may be a number, a string, a bool, a `StrEnum`, a dataclass, a tuple, or a mapping from strings. A field may
also be optional: one of these types, or None. Integers are from 0 to 2^63 - 1. A value that `encode` would not write
is refused with `ProtocolError`.
"""

import dataclasses
import enum
import functools
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.channels.channel import MAX_FRAME_BYTES

_MAX_INTEGER = (1 << 63) - 1
_TYPE = "type"


class ProtocolError(Exception):
    """The other side sent something that is not a valid message."""


def encode(message: Any) -> bytes:
    """A dataclass as JSON, with the name of its class as `type`.

    Raises:
        ValueError: a number is not finite.
    """
    record = {_TYPE: type(message).__name__, **_record(message)}
    return _ENCODER.encode(record).encode()


def _record(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in _field_types(type(value))}
    return dict(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_record)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ProtocolError: `body` is larger than `MAX_FRAME_BYTES`, is not a JSON object, has a name twice in one object,
            or exceeds another limit of `parse_value` in `foundation/bounded_json.py`.
    """
    try:
        return parse_object(body, max_bytes=MAX_FRAME_BYTES)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def decode(record: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """The dataclass from which `encode` made `record`.

    Args:
        record: the result of `parse`.
        kinds: the classes that are allowed, by name.

    Raises:
        ProtocolError: the record is of none of these classes, or a field is missing, superfluous or invalid.
    """
    name = record.get(_TYPE)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"there is no message of the type {name!r:.80}")
    return _read_record(kind, {key: value for key, value in record.items() if key != _TYPE}, kind.__name__)


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value of a field of type `kind`.

    Args:
        kind: the field's type.
        value: the value in the JSON document.
        where: the field's place in the message, for errors.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        [inner] = [one for one in arguments if one is not types.NoneType]
        return None if value is None else _read(inner, value, where)
    if origin is tuple:
        _expect(type(value) is list, where, "a list", value)
        return tuple(_read(arguments[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin is Mapping:
        _expect(type(value) is dict, where, "an object", value)
        return {name: _read(arguments[1], one, f"{where}[{name!r:.80}]") for name, one in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_record(cast("type", kind), value, where)
    if kind is int:
        is_integer = type(value) is int and 0 <= value <= _MAX_INTEGER
        _expect(is_integer, where, "an integer from 0 to 2^63 - 1", value)
    elif kind is float:
        is_finite = type(value) in {int, float} and abs(value) <= sys.float_info.max
        _expect(is_finite, where, "a finite number", value)
    elif issubclass(kind, enum.StrEnum):
        _expect(value in list(kind), where, f"one of {', '.join(kind)}", value)
    else:
        _expect(type(value) is kind, where, "true or false" if kind is bool else "a string", value)
    return kind(value)


def _expect(is_right: bool, where: str, expected: str, value: Any) -> None:
    if not is_right:
        raise ProtocolError(f"{where} must be {expected}, not {value!r:.80}")


def _read_record(kind: type, value: Any, where: str) -> Any:
    _expect(type(value) is dict, where, "an object", value)
    field_types = _field_types(kind)
    if value.keys() != field_types.keys():
        different = sorted(value.keys() ^ field_types.keys())
        raise ProtocolError(
            f"{where} must have the fields {', '.join(field_types)}; missing or unknown: {different!r:.200}"
        )
    fields = {name: _read(field, value[name], f"{where}.{name}") for name, field in field_types.items()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ProtocolError(f"{where}: {error!s:.300}") from error
