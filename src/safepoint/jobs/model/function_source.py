"""A training function and its arguments, as a script that another process runs.

Promises: the script has the function's source as its file has it, letter by letter, and arguments equal to those
given; no shell and no pickle is involved. A function that needs names from outside, and arguments that are not plain
values (`literals`), are refused by name.
"""

import __future__

import ast
import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safepoint.errors import UsageError
from safepoint.jobs.model.literals import literal

_FUTURE_ANNOTATIONS = "from __future__ import annotations\n"
_IN_EVERY_MODULE = frozenset(
    ("__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__", "__annotations__")
)
_CALLED_IN_VAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SELF_CONTAINED = "write a function with `def`, with everything it needs imported or defined inside it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A function and its arguments.

    Args:
        name: the function's.
        definition: source that defines it in an empty module.
        arguments: a dict by name, as source.
    """

    name: str
    definition: str
    arguments: str

    def script(self, *, look_in: str | None = None, arguments: str | None = None) -> str:
        """A script that calls it, in a rank; processes that ranks start for their data import it without a call.

        Args:
            look_in: a folder in which its imports are looked for, when they are found nowhere else.
            arguments: source to use instead of its own arguments.
        """
        path = f'    __import__("sys").path.append({look_in!a})\n' if look_in is not None else ""
        call = f"    {self.name}(**{self.arguments if arguments is None else arguments})\n"
        return f'{self.definition.rstrip()}\n\n\nif __name__ == "__main__":\n{path}{call}'


def take_function(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Shipment:
    """The function as source.

    Args:
        function: made with `def`, with everything it needs inside.
        arguments: what it is called with, by name.

    Raises:
        UsageError: it, or one of the arguments, cannot be sent to a job; the text says why and what to do.
    """
    name = _check_kind(function)
    given = dict(arguments or {})
    signature = inspect.signature(function)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UsageError(
            f"{name}{signature} cannot be called with its func_args: {error}", hint="func_args are passed by name"
        ) from error
    definition = _definition(name, function)
    _check_names(name, function, definition)
    return Shipment(name=name, definition=definition, arguments=literal(given, "func_args"))


def _check_kind(function: Any) -> str:
    """The function's name."""
    name = getattr(function, "__name__", None)
    if isinstance(function, functools.partial):
        raise UsageError(
            "a functools.partial cannot be sent to a job as source",
            hint="pass the function itself, and its values as func_args",
        )
    if inspect.ismethod(function):
        raise UsageError(
            f"{function.__qualname__} is a method, and its object cannot be sent to a job", hint=_SELF_CONTAINED
        )
    if not inspect.isfunction(function):
        what = f"the class {name}" if inspect.isclass(function) else f"{name or type(function).__name__}"
        raise UsageError(
            f"{what} is not a function written in Python, so it has no source to send", hint=_SELF_CONTAINED
        )
    code = function.__code__
    name = code.co_name
    if name == "<lambda>":
        raise UsageError(
            "a lambda cannot be sent to a job: it has no source that can run alone", hint="define it with `def`"
        )
    if hasattr(function, "__wrapped__"):
        raise UsageError(f"{name} is decorated, and a decorator cannot be sent to a job", hint="remove the decorator")
    if code.co_freevars:
        around = ", ".join(code.co_freevars)
        raise UsageError(
            f"{name} uses {around} of the enclosing function, which is not sent to the job",
            hint="pass values as func_args, and define or import the rest inside it",
        )
    if code.co_flags & _CALLED_IN_VAIN:
        raise UsageError(
            f"{name} is a coroutine or a generator, whose body does not run when it is called", hint=_SELF_CONTAINED
        )
    owner = function.__qualname__.rpartition(".")[0]
    if owner and not owner.endswith("<locals>"):
        raise UsageError(
            f"{function.__qualname__} belongs to a class, which is not sent to the job", hint=_SELF_CONTAINED
        )
    return name


def _definition(name: str, function: types.FunctionType) -> str:
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"the source of {name} was not found ({error})",
            hint="define it in a file or a notebook's cell, or give the path of a script",
        ) from error
    source = "".join(lines)
    # An indented function keeps its indentation: texts over several lines are data.
    definition = f"if True:\n{source}" if source[:1].isspace() else source
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        definition = _FUTURE_ANNOTATIONS + definition
    stale = UsageError(
        f"the source of {name} has changed since it was loaded",
        hint="load it again: restart the program, or run the notebook's cell once more",
    )
    try:
        body = ast.parse(definition.removeprefix(_FUTURE_ANNOTATIONS)).body
    except SyntaxError as error:
        raise stale from error
    if body and isinstance(body[0], ast.If):
        body = body[0].body
    node = body[0] if len(body) == 1 else None
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        raise stale
    if node.decorator_list:
        decorators = ", ".join(f"@{ast.unparse(one)}" for one in node.decorator_list)
        raise UsageError(f"{name} is decorated with {decorators}, which is not sent to the job", hint="remove it")
    if _parameters(node.args) != _parameters_of(function):
        raise stale
    return definition


def _parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [one.arg for one in (*named, arguments.vararg, arguments.kwarg) if one is not None]


def _parameters_of(function: types.FunctionType) -> list[str]:
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[:count])


# ---- names that would be missing ------------------------------------------------------------------------------


def _check_names(name: str, function: types.FunctionType, definition: str) -> None:
    used: set[str] = set()
    defined: set[str] = set()
    _collect(compile(definition, f"<{name}>", "exec", dont_inherit=True), used, defined)
    missing = sorted(used - defined - _IN_EVERY_MODULE - _builtin_names())
    if not missing:
        return
    modules = [one for one in missing if isinstance(function.__globals__.get(one), types.ModuleType)]
    hints: list[str] = []
    if modules:
        imports = "; ".join(_import_of(one, function.__globals__[one]) for one in modules)
        hints.append(f"write `{imports}` inside it")
    if len(modules) < len(missing):
        others = ", ".join(one for one in missing if one not in modules)
        hints.append(f"import or define {others} inside it, or pass values as func_args")
    raise UsageError(
        f"{name} uses {', '.join(missing)} from outside the function, which is not sent to the job",
        hint="; ".join(hints),
    )


def _collect(code: types.CodeType, used: set[str], defined: set[str]) -> None:
    """Global names that a module's code, and all code in it, loads and stores."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    own: set[str] = set()
    loaded: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL":
            defined.add(instruction.argval)
        elif instruction.opname == "STORE_NAME":
            own.add(instruction.argval)
        elif instruction.opname == "LOAD_NAME":
            loaded.add(instruction.argval)
        elif instruction.opname in {"LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}:
            used.add(instruction.argval)
    used |= loaded - own  # in a class's body, what it has defined before
    if not is_function and code.co_name == "<module>":
        defined |= own
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _collect(constant, used, defined)


def _builtin_names() -> set[str]:
    """What every interpreter has, without what a notebook adds."""
    names = vars(builtins).items()
    return {name for name, value in names if not str(getattr(value, "__module__", "")).startswith("IPython")}


def _import_of(name: str, module: types.ModuleType) -> str:
    return f"import {module.__name__}" if module.__name__ == name else f"import {module.__name__} as {name}"
