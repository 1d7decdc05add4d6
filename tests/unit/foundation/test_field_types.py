"""What a field takes: everything else is refused with its name."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from safepoint.foundation.field_types import (
    FLAG,
    NAMED,
    PATH,
    SECONDS,
    TEXT,
    VARIABLES,
    Kind,
    check_fields,
    texts,
    whole,
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (TEXT, ""),
        (TEXT.optional, None),
        (FLAG, False),
        (PATH, "x"),
        (PATH, Path("x")),
        (SECONDS, 1),
        (SECONDS, 0.1),
        (whole(), -3),
        (whole(1), 1),
        (whole(1, 9), 9),
        (texts(), []),
        (texts(), ("a", "b")),
        (NAMED, {"a": 1}),
        (VARIABLES, MappingProxyType({"a": "b"})),
    ],
)
def test_what_fits(kind: Kind, value: Any) -> None:
    """Also at the ends of its range."""
    kind.check("field", value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (TEXT, 5, "field must be a string, not 5"),
        (TEXT, None, "field must be a string, not None"),
        (TEXT.optional, b"x", "field must be a string or None, not a value of type bytes"),
        (FLAG, 1, "field must be True or False, not 1"),
        (FLAG, "false", "field must be True or False, not 'false'"),
        (PATH, 5, "field must be a path, not 5"),
        (SECONDS, 0, "field must be a positive number of seconds, not 0"),
        (SECONDS, float("inf"), "field must be a positive number of seconds, not inf"),
        (SECONDS, float("nan"), "field must be a positive number of seconds, not nan"),
        (SECONDS, True, "field must be a positive number of seconds, not True"),
        (whole(1), True, "field must be a whole number, not True"),
        (whole(1), 1.0, "field must be a whole number, not 1.0"),
        (whole(1), 0, "field 0 must be at least 1"),
        (whole(1, 9), 10, "field 10 must be from 1 to 9"),
        (texts(), "torch", "field must be a list of strings, not 'torch'"),
        (texts(), ["a", 1], "field must be a list of strings, not a value of type list"),
        (NAMED, [1], "field must be a mapping with names as keys, not a value of type list"),
        (NAMED, {1: 2}, "field must be a mapping with names as keys, not a value of type dict"),
        (VARIABLES, {"a": 1}, "field must be a mapping of names to strings, not a value of type dict"),
    ],
)
def test_what_does_not(kind: Kind, value: Any, message: str) -> None:
    """The content of a container may be a secret and is not shown."""
    with pytest.raises(ValueError) as caught:
        kind.check("field", value)
    assert str(caught.value) == message


@dataclass
class Value:
    name: Any = "a"
    count: Any = 1


@pytest.mark.parametrize(
    ("wrong", "field"), [(Value(name=1), "name"), (Value(count=0), "count"), (Value(count=True), "count")]
)
def test_fields_are_checked_by_a_table(wrong: Value, field: str) -> None:
    """The first that does not fit is named; types that usually fit are not taken on trust where there is a range."""
    table = {"name": TEXT, "count": whole(1)}
    check_fields(Value(), table)
    with pytest.raises(ValueError, match=f"^{field} "):
        check_fields(wrong, table)
