"""Finds the attributes of a trainer that a training can change, in the code of the script and its libraries.

A checkpoint contains numbers that a training has counted. Another person may have written the checkpoint, and added
values of settings to these numbers. Examples are the weight of a part of the loss, and the longest text to generate.
Such a value would change what the script trains, and each later checkpoint would contain the value. So a number is
restored only if some code sets the attribute after the trainer was made.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

_SETS = {"STORE_ATTR", "DELETE_ATTR"}
_MAKES = {"__init__", "__new__", "__post_init__"}


def set_attributes(trainer: Any) -> frozenset[str]:
    """The names of all attributes that some code sets outside of an `__init__`.

    This function examines the classes of the trainer and of its callbacks. It also examines the functions in the
    script and in the modules of these classes, and all inner functions. If code sets an attribute by a computed name,
    the attribute is not found.
    """
    kinds = _classes(trainer)
    modules = [sys.modules.get(name) for name in {"__main__", *(kind.__module__ for kind in kinds)}]
    codes = [*map(_codes_of, kinds), *(_codes_of(module) for module in modules if module is not None)]
    return frozenset(name for of_one in codes for code in of_one for name in _names_in(code))


def given_names(trainer: Any) -> frozenset[str]:
    """The names of the parameters of the trainer's `__init__`, and the names of its TrainingArguments."""
    contents = [cast("dict[str, Any]", vars(kind)) for kind in cast("Any", type(trainer)).__mro__]
    made = [one.get("__init__") for one in contents]
    functions = [inspect.unwrap(one) for one in made if isinstance(one, FunctionType)]
    parameters = (name for one in functions for name in inspect.signature(one).parameters)
    return frozenset(parameters) | frozenset(getattr(trainer.args, "__dict__", {}))


def _classes(trainer: Any) -> list[Any]:
    handler: Any = getattr(trainer, "callback_handler", None)
    found: list[Any] = [type(one) for one in (trainer, *getattr(handler, "callbacks", ()))]
    return list({kind: None for one in found for kind in one.__mro__ if kind is not object})


def _codes_of(owner: Any) -> list[CodeType]:
    """The code of the functions in a class, or of the functions that a module itself defines."""
    name = owner.__name__ if isinstance(owner, ModuleType) else None
    values = list(vars(owner).items())
    found = [one for key, value in values if key not in _MAKES for one in _functions_in(value)]
    return [one.__code__ for one in found if name is None or one.__module__ == name]


def _functions_in(value: Any) -> Iterator[FunctionType]:
    parts: Iterable[Any] = (value,)
    if isinstance(value, property):
        parts = (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod):
        parts = (cast("Any", value).__func__,)
    for part in parts:
        inner = inspect.unwrap(part) if callable(part) else part
        if isinstance(inner, FunctionType):
            yield inner


@functools.lru_cache(maxsize=10_000)
def _names_in(code: CodeType) -> frozenset[str]:
    own = {one.argval for one in dis.get_instructions(code) if one.opname in _SETS}
    inner = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name not in _MAKES]
    return frozenset(own).union(*map(_names_in, inner))
