"""Plain values as source: equal, of the same types, and nothing else."""

import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.errors import UsageError
from safepoint.jobs.model.function_source import as_options, source_of

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
VALUES = st.recursive(
    KEYS | st.complex_numbers(allow_nan=False),
    lambda inside: (
        st.lists(inside)
        | st.dictionaries(KEYS, inside)
        | st.tuples(inside, inside)
        | st.tuples(inside)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_it_is_read_as_it_was(value: Any) -> None:
    """Also by a reader of ASCII; texts may hold what no file can."""
    text = source_of(value, "value")
    assert text.isascii()
    read = eval(text)
    assert read == value
    assert repr(read) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


@pytest.mark.parametrize(
    "value",
    [-0.0, math.inf, -math.inf, 10**5000, -(10**5000), "\udcff\ud800", "", set(), ()],
    ids=["minus zero", "inf", "-inf", "long", "-long", "halves", "empty", "set", "tuple"],
)
def test_the_ends_of_the_types(value: Any) -> None:
    """Signed zero, no finite number, more digits than are read, halves of letters."""
    read = eval(source_of(value, "value"))
    assert read == value
    assert type(read) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, read) == math.copysign(1, value)


def test_not_a_number() -> None:
    """It stays none."""
    assert math.isnan(eval(source_of(math.nan, "value")))


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Path("x"), r"func_args is of type PosixPath \(pathlib.PosixPath\)"),
        (np.float64(1.5), r"of type float64 \(numpy.float64\)"),
        (Color.RED, r"of type Color"),
        ({"a": [1, {"b": print}]}, r"func_args\['a'\]\[1\]\['b'\] is a function \(print\)"),
        ({(1, Path("x")): 2}, r"a key of func_args\[1\] is of type PosixPath"),
        ([object()], r"func_args\[0\] is of type object"),
        ({"model": int}, r"func_args\['model'\] is of type type \(int\)"),
    ],
)
def test_more_than_a_value_is_refused_by_name(value: Any, message: str) -> None:
    """With the place, the type, and what is accepted."""
    with pytest.raises(UsageError, match=message) as error:
        source_of(value, "func_args")
    assert "numbers, strings" in str(error.value)


def test_a_snake_is_refused() -> None:
    """What contains itself, and what the parser would give up on; twice the same is no snake."""
    snake: list[Any] = []
    snake.append(snake)
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    for value in (snake, deep):
        with pytest.raises(UsageError, match="contains itself"):
            source_of(value, "value")
    twin = [1]
    assert source_of([twin, twin], "value") == "[[1], [1]]"


def test_options_of_a_script() -> None:
    """As `HfArgumentParser` and argparse read them."""
    arguments = {"lr": 1e-4, "name": "a b $HOME", "fp16": True, "sizes": [1, 2], "empty": ""}
    assert as_options(arguments) == [
        "--lr",
        "0.0001",
        "--name",
        "a b $HOME",
        "--fp16",
        "--sizes",
        "1",
        "2",
        "--empty",
        "",
    ]
    assert as_options(None) == []


@pytest.mark.parametrize("value", [None, False, {"a": 1}, [True], [[1]], Path("x")])
def test_what_a_script_cannot_be_given(value: Any) -> None:
    """A switch that is off is left out by its author, not by Safepoint."""
    with pytest.raises(UsageError, match=r"func_args\['x'\]"):
        as_options({"x": value})


@pytest.mark.parametrize("name", ["", "a=b", " a"])
def test_what_cannot_be_an_option(name: str) -> None:
    """Or it would be read as another one."""
    with pytest.raises(UsageError, match="not a valid option name"):
        as_options({name: 1})
