"""Plain values, as Python's source and as a script's options.

Plain are None, True, False, int, float, complex, str, bytes, and list, tuple, set, frozenset and dict of these.
"""

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, cast

from safepoint.errors import UsageError

_MOST_DEPTH = 50
"""Python's parser has a limit for brackets in brackets."""
_ACCEPTED = "None, True, False, numbers, texts, bytes, and lists, tuples, sets and dicts of these"
_REPEATABLE: tuple[type, ...] = (types.NoneType, bool, str, bytes)


def literal(value: Any, where: str, *, _around: tuple[int, ...] = ()) -> str:
    """An expression in ASCII whose value is equal to `value`, of the same types.

    Args:
        value: a plain value.
        where: its name in a message.

    Raises:
        UsageError: it is not a plain value.
    """
    kind = cast("type[Any]", type(value))  # subclasses are something else: numpy's float64 is a float
    if kind in _REPEATABLE:
        return ascii(value)
    if kind is int:
        return str(value) if abs(value) < 1 << 64 else hex(value)  # many digits are refused, both ways
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float('{value!r}')"
    if kind is complex:
        return f"complex({literal(value.real, where)}, {literal(value.imag, where)})"
    if kind in {list, tuple, set, frozenset, dict}:
        if id(value) in _around or len(_around) >= _MOST_DEPTH:
            raise UsageError(f"{where} contains itself, or is nested more than {_MOST_DEPTH} deep")
        return _collection(value, where, (*_around, id(value)))
    shown = getattr(value, "__qualname__", None) or f"{kind.__module__}.{kind.__qualname__}"
    what = "a function" if inspect.isroutine(value) else f"of type {kind.__qualname__}"
    raise UsageError(
        f"{where} is {what} ({shown}), which cannot be sent to a job; accepted: {_ACCEPTED}",
        hint="create it inside the function, from such values",
    )


def _collection(value: Any, where: str, around: tuple[int, ...]) -> str:
    if isinstance(value, dict):
        pairs: list[str] = []
        for key, item in cast("dict[Any, Any]", value).items():
            key_text = literal(key, f"a key of {where}", _around=around)
            pairs.append(f"{key_text}: {literal(item, f'{where}[{key_text}]', _around=around)}")
        return "{" + ", ".join(pairs) + "}"
    numbered = enumerate(cast("list[Any]", value))
    items = [literal(item, f"{where}[{number}]", _around=around) for number, item in numbered]
    match value:
        case list():
            return f"[{', '.join(items)}]"
        case tuple():
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        case _:
            return f"{type(value).__name__}([{', '.join(items)}])"


def as_options(arguments: Mapping[str, Any] | None) -> list[str]:
    """Arguments as the options of a script: `{"lr": 1e-4, "fp16": True}` → `--lr 0.0001 --fp16`.

    Raises:
        UsageError: a value cannot be an option.
    """
    options: list[str] = []
    for name, value in (arguments or {}).items():
        if not name or name != name.strip() or "=" in name:
            raise UsageError(f"func_args has {name!r}, which is not a valid name of a script's option")
        options.append(f"--{name}")
        if value is True:
            continue
        for item in cast("list[Any]", value if isinstance(value, (list, tuple)) else [value]):
            if type(item) not in {str, int, float}:
                raise UsageError(
                    f"func_args[{name!r}] is {value!r}, which cannot be an option of a script",
                    hint="use texts, numbers, lists of these, and True for a switch",
                )
            options.append(str(item))
    return options
