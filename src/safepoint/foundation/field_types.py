"""Checks whether the fields of an object have valid values. A table names the kind of value for each field.

A value that does not fit raises a ValueError that names the field and, if it cannot be a secret, the value.
Nothing is converted: `"3"` is not a whole number.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Which values a field takes.

    Args:
        words: the words for a value of this kind, for messages, such as `a whole number`.
        fits: says whether a value is of this kind. It is called with values of all types.
        least: the smallest valid number; None for no limit.
        most: the greatest valid number; None for no limit.
        is_optional: whether the field may be None.
        usual: a type whose values all pass `fits`, or None. `check_fields` compares the type first, because this is
            faster than `fits`.
    """

    words: str
    fits: Callable[[Any], bool]
    least: float | None = None
    most: float | None = None
    is_optional: bool = False
    usual: type[Any] | None = None

    @property
    def optional(self) -> "Kind":
        """This kind, for a field that may also be None."""
        return replace(self, is_optional=True)

    def check(self, name: str, value: object) -> None:
        """Raise ValueError when `value` is invalid for the field `name`."""
        given: Any = value
        if value is None and self.is_optional:
            return
        if not self.fits(value):
            # A list or a mapping is not shown, because it may contain a secret.
            is_plain = value is None or isinstance(value, bool | int | float | str)
            shown = repr(value) if is_plain else f"a value of type {type(value).__name__}"
            raise ValueError(f"{name} must be {self.words}{' or None' if self.is_optional else ''}, not {shown}")
        if (self.least is not None and given < self.least) or (self.most is not None and given > self.most):
            reach = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ValueError(f"{name} {value} must be {reach}")


def whole(least: int | None = None, most: int | None = None) -> Kind:
    """A whole number. True and False are not whole numbers."""
    return Kind(words="a whole number", fits=_is_whole, usual=int, least=least, most=most)


def finite(least: float | None = None) -> Kind:
    """A number that is neither infinite nor NaN. True and False are not numbers."""
    return Kind(words="a finite number", fits=lambda value: _is_number(value) and abs(value) < math.inf, least=least)


def texts(words: str = "a list of strings") -> Kind:
    """A list or tuple of strings. A single string is refused."""
    return Kind(words=words, fits=_are_texts)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that can be converted to a float.

    Arithmetic with floats converts whole numbers, and raises an error for a number that is too large.
    """
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in cast("list[Any]", value))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value))


def _are_variables(value: Any) -> bool:
    return _is_named(value) and all(isinstance(text, str) for text in value.values())


TEXT = Kind(words="a string", fits=lambda value: isinstance(value, str), usual=str)
NUMBER = Kind(words="a number", fits=_is_number)
FLAG = Kind(words="True or False", fits=lambda value: isinstance(value, bool), usual=bool)
PATH = Kind(words="a path", fits=lambda value: isinstance(value, str | os.PathLike))
SECONDS = Kind(words="a positive number of seconds", fits=_is_positive)
NAMED = Kind(words="a mapping with names as keys", fits=_is_named)
VARIABLES = Kind(words="a mapping of names to strings", fits=_are_variables)
MOST_COUNT = 1 << 53
"""Counts up to this number are exact as floats."""
COUNT = whole(0, MOST_COUNT)


def check_fields(value: object, kinds: Mapping[str, Kind]) -> None:
    """Check the fields of `value`.

    Args:
        value: any object with these attributes.
        kinds: what each field takes, by its name.

    Raises:
        ValueError: a field is invalid.
    """
    for name, kind in kinds.items():
        given = getattr(value, name)
        # For most values these comparisons are enough. They are fast: to list a thousand jobs, sixteen thousand
        # fields are checked.
        is_usual = type(given) is kind.usual
        if is_usual and (kind.least is None or given >= kind.least) and (kind.most is None or given <= kind.most):
            continue
        kind.check(name, given)
