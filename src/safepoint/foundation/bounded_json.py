"""JSON of bounded size and depth, in texts and files that other users may have written.

The values of a JSON text are counted before the text is parsed, because a small text can fill the memory: an empty
list takes three bytes of text, but 64 bytes of memory.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from safepoint.foundation.shared_folders.opening import read_regular

MAX_BYTES = 1 << 20
_MAX_VALUES = 1 << 22
"""The limit of values in one JSON text. A text with this number of values takes about 0.5 GB of memory when it is
parsed. The limit is high enough for the header of a safetensors file with 500,000 tensors."""
_STRING_OR_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([,\[{])', re.DOTALL)
_MAX_DEPTH = 128
_LONG_NUMBER = re.compile(r"[0-9]{309}")
"""Finds 309 digits in a row. The text may have a whole number that is larger than any float, or the digits may be in
a string."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _whole(digits: str) -> int:
    value = int(digits)
    try:
        float(value)
    except OverflowError as error:
        raise ValueError(f"a number has {len(digits.lstrip('-'))} digits") from error
    return value


def parse_object(
    data: bytes | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_values: int = _MAX_VALUES,
    constant: Callable[[str], object] = _refuse,
) -> dict[str, Any]:
    """Parse a text that is one object, as `parse_value` does.

    Raises:
        ValueError: `data` is not such an object; see `parse_value`.
    """
    record = parse_value(data, max_bytes=max_bytes, max_values=max_values, constant=constant)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  the data is invalid, not the call
    return cast("dict[str, Any]", record)


def parse_value(
    data: bytes | str,
    *,
    max_bytes: int = MAX_BYTES,
    max_values: int = _MAX_VALUES,
    constant: Callable[[str], object] = _refuse,
) -> object:
    """Parse a text that is one JSON value. Duplicate names in an object are refused.

    Whole numbers that are too large for a float are refused, too.

    Args:
        data: the JSON text, or its bytes in UTF-8.
        max_bytes: longer data is refused before it is parsed. If `data` is a string, its bytes in UTF-8 are counted.
        max_values: data with more values is refused before it is parsed.
        constant: called with `NaN`, `Infinity` or `-Infinity`; returns the value to use. The default refuses these
            words.

    Raises:
        ValueError: `data` is not JSON, is too large, has too many values, or is nested too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return record

    if _is_longer(data, max_bytes):
        raise ValueError(f"it is larger than {max_bytes} bytes")
    if len(data) > max_values and has_more_values(data, max_values):
        raise ValueError(f"it has more than {max_values} values")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        whole = _whole if _LONG_NUMBER.search(text) else None
        record = json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_int=whole)
    except RecursionError as error:
        raise ValueError("it is not JSON: it is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    level: list[Any] = [record] if isinstance(record, dict | list) else []
    for _ in range(_MAX_DEPTH):
        contents: list[Any] = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for content in contents for item in content if isinstance(item, dict | list)]
        if not level:
            return cast("object", record)
    raise ValueError(f"it has objects or lists nested deeper than {_MAX_DEPTH} levels")


def _is_longer(data: bytes | str, max_bytes: int) -> bool:
    if len(data) > max_bytes or isinstance(data, bytes) or data.isascii():
        return len(data) > max_bytes
    return len(data.encode("utf-8", "surrogatepass")) > max_bytes


def has_more_values(data: bytes | str, most: int) -> bool:
    """Whether a JSON text has more than about `most` values. The text is not parsed.

    The function counts commas, lists and objects outside of strings. The text need not be valid.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    # This count includes the commas and brackets inside of strings, but is much faster than the count below.
    if sum(map(text.count, (b",", b"[", b"{"))) <= most:
        return False
    count = num_strings = 0
    for match in _STRING_OR_VALUE.finditer(text):
        if match.lastindex is None:
            num_strings += 1
        else:
            count += 1
        if count > most or num_strings > 2 * (most + 1):  # each value has at most one string and one name
            return True
    return False


def read_object(
    path: Path, *, max_bytes: int = MAX_BYTES, constant: Callable[[str], object] = _refuse
) -> dict[str, Any]:
    """The object in a file; see `read_regular` and `parse_object`.

    Raises:
        OSError: the file cannot be read.
        ValueError: `parse_object` refuses the content of the file.
    """
    return parse_object(read_regular(path, max_bytes), max_bytes=max_bytes, constant=constant)
