"""Frozen dataclasses as JSON objects, read strictly.

A field may be a number, a text, a bool, a `StrEnum`, a dataclass, a tuple, a mapping from texts, or one of these or
None. Integers are from 0 to 2^63 - 1. Bytes that `encode` would not write raise `ProtocolError`, and nothing else.
"""

import dataclasses
import enum
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from safepoint.checkpoint.format.manifest import parse_json_object
from safepoint.errors import ManifestError

_MAX_INTEGER = (1 << 63) - 1
_TYPE = "type"
_Reader = Callable[[Any, str], Any]
"""Given a value that JSON can express, and where it stands: the value of the field."""


class ProtocolError(Exception):
    """The other side sent something that is not a valid message."""


def encode(message: Any) -> bytes:
    """A dataclass as JSON, with the name of its class as `type`.

    Raises:
        ValueError: a number is not finite.
    """
    record = {_TYPE: type(message).__name__, **_record(message)}
    return json.dumps(record, separators=(",", ":"), allow_nan=False, default=_record).encode()


def _record(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in _field_types(type(value))}
    return dict(value)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ProtocolError: it is not one, or a name occurs twice in an object.
    """
    try:
        return parse_json_object(body)
    except ManifestError as error:
        raise ProtocolError(error.message) from error


def decode(record: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """The dataclass that `encode` made `record` of.

    Args:
        record: from `parse`.
        kinds: the classes that are allowed, by name.

    Raises:
        ProtocolError: it is none of them, or a field is missing, superfluous or invalid.
    """
    name = record.get(_TYPE)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"there is no message of the type {name!r:.80}")
    return _reader(kind)({key: value for key, value in record.items() if key != _TYPE}, kind.__name__)


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Reads the fields of one type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        [inner] = [_reader(one) for one in arguments if one is not types.NoneType]
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        return functools.partial(_read_items, _reader(arguments[0]))
    if origin is Mapping:
        return functools.partial(_read_mapping, _reader(arguments[1]))
    if dataclasses.is_dataclass(kind):
        record_type = cast("type", kind)
        readers = {name: _reader(field) for name, field in _field_types(record_type).items()}
        return functools.partial(_read_fields, record_type, readers)
    if issubclass(kind, enum.StrEnum):
        return functools.partial(_read_choice, kind)
    return {int: _read_integer, float: _read_number, str: _read_text, bool: _read_bool}[kind]


def _expect(is_right: bool, where: str, expected: str, value: Any) -> None:
    if not is_right:
        raise ProtocolError(f"{where} must be {expected}, not {value!r:.80}")


def _read_integer(value: Any, where: str) -> int:
    _expect(type(value) is int and 0 <= value <= _MAX_INTEGER, where, "an integer from 0 to 2^63 - 1", value)
    return value


def _read_number(value: Any, where: str) -> float:
    is_finite = type(value) in {int, float} and abs(value) <= sys.float_info.max
    _expect(is_finite, where, "a finite number", value)
    return float(value)


def _read_text(value: Any, where: str) -> str:
    _expect(type(value) is str, where, "a text", value)
    return value


def _read_bool(value: Any, where: str) -> bool:
    _expect(type(value) is bool, where, "true or false", value)
    return value


def _read_choice(kind: type[enum.StrEnum], value: Any, where: str) -> enum.StrEnum:
    _expect(value in list(kind), where, f"one of {', '.join(kind)}", value)
    return kind(value)


def _read_items(item: _Reader, value: Any, where: str) -> tuple[Any, ...]:
    _expect(type(value) is list, where, "a list", value)
    return tuple(item(one, f"{where}[{index}]") for index, one in enumerate(value))


def _read_mapping(item: _Reader, value: Any, where: str) -> dict[str, Any]:
    _expect(type(value) is dict, where, "an object", value)
    return {name: item(one, f"{where}[{name!r:.80}]") for name, one in value.items()}


def _read_fields(kind: type, readers: Mapping[str, _Reader], value: Any, where: str) -> Any:
    _expect(type(value) is dict, where, "an object", value)
    if value.keys() != readers.keys():
        different = sorted(value.keys() ^ readers.keys())
        raise ProtocolError(
            f"{where} must have the fields {', '.join(readers)}; missing or unknown: {different!r:.200}"
        )
    fields = {name: reader(value[name], f"{where}.{name}") for name, reader in readers.items()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ProtocolError(f"{where}: {error!s:.300}") from error
