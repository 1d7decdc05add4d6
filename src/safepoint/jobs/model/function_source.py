"""Turns a training function and its arguments into a script that another process runs.

Promises: the script contains the source of the function unchanged, and arguments that are equal to the given
arguments. No shell and no pickle is used. A function is refused if it uses names from outside the function, except
builtins. Arguments are refused if they are not plain values. Plain values are None, True, False, int, float, complex,
str and bytes, and lists, tuples, sets, frozensets and dicts of these.
"""

import __future__

import ast
import builtins
import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from safepoint.errors import UsageError

_FUTURE_ANNOTATIONS = "from __future__ import annotations\n"
_IN_EVERY_MODULE = frozenset(
    ("__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__", "__annotations__")
)
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SELF_CONTAINED = "write a function with `def`; inside the function, import or define everything that it uses"
_MOST_DEPTH = 50
"""How deep arguments may be nested: Python's parser limits the nesting of brackets."""
_ACCEPTED = "None, True, False, numbers, strings, bytes, and lists, tuples, sets and dicts of these"
_REPEATABLE: tuple[type, ...] = (types.NoneType, bool, str, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A function and its arguments.

    Args:
        name: the name of the function.
        definition: source that defines the function in an empty module.
        arguments: the source of a dict of its arguments by name.
    """

    name: str
    definition: str
    arguments: str

    def script(self, *, look_in: str | None = None, arguments: str | None = None, before: str = "") -> str:
        """The script.

        A rank that runs the script calls the function. A data loader worker that imports the script does not.

        Args:
            look_in: a folder that is searched last for imported modules; None for no folder.
            arguments: source to use instead of `self.arguments`; None to use `self.arguments`.
            before: lines, indented by four spaces, to run before the call.
        """
        path = f'    __import__("sys").path.append({look_in!a})\n' if look_in is not None else ""
        call = f"    {self.name}(**{self.arguments if arguments is None else arguments})\n"
        return f'{self.definition.rstrip()}\n\n\nif __name__ == "__main__":\n{before}{path}{call}'


def take_function(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Shipment:
    """The source of a function and its arguments.

    Args:
        function: defined with `def`, with all its imports and helpers inside it.
        arguments: its arguments, by name.

    Raises:
        UsageError: the function or an argument cannot be sent to a job.
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
    return Shipment(name=name, definition=definition, arguments=source_of(given, "func_args"))


def _check_kind(function: Any) -> str:
    """Check that `function` is a plain function, and return its name."""
    name = getattr(function, "__name__", None)
    if isinstance(function, functools.partial):
        raise UsageError(
            "a functools.partial cannot be sent to a job as source",
            hint="pass the function itself, and its arguments as func_args",
        )
    if inspect.ismethod(function):
        raise UsageError(
            f"{function.__qualname__} is a method of an object, which cannot be sent to a job", hint=_SELF_CONTAINED
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
            "a lambda cannot be sent to a job, because its source cannot run alone",
            hint="define a function with `def`",
        )
    if hasattr(function, "__wrapped__"):
        raise UsageError(f"{name} is decorated, and a decorator cannot be sent to a job", hint="remove the decorator")
    if code.co_freevars:
        around = ", ".join(code.co_freevars)
        raise UsageError(
            f"{name} uses variables of the enclosing function ({around}), but only {name} is sent to the job",
            hint="pass values as func_args, and define or import everything else inside the function",
        )
    if code.co_flags & _RUNS_LATER:
        raise UsageError(
            f"{name} is a coroutine or a generator; calling it does not run its body", hint=_SELF_CONTAINED
        )
    owner = function.__qualname__.rpartition(".")[0]
    if owner and not owner.endswith("<locals>"):
        raise UsageError(
            f"{function.__qualname__} is defined in a class, which is not sent to the job", hint=_SELF_CONTAINED
        )
    return name


def _definition(name: str, function: types.FunctionType) -> str:
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"the source of {name} was not found ({error})",
            hint="define it in a file or in a notebook cell, or give the path of a script",
        ) from error
    source = "".join(lines)
    # Put an indented function below `if True:`. Dedenting it would change strings that span several lines.
    definition = f"if True:\n{source}" if source[:1].isspace() else source
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        definition = _FUTURE_ANNOTATIONS + definition
    stale = UsageError(
        f"the source of {name} has changed since it was loaded",
        hint="restart the program, or run the notebook cell again",
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
        raise UsageError(
            f"{name} is decorated with {decorators}, which is not sent to the job", hint=f"remove {decorators}"
        )
    names = [one.arg for one in ast.iter_child_nodes(node.args) if isinstance(one, ast.arg)]
    if names != list(inspect.signature(function).parameters):
        raise stale
    return definition


# ---- names that would be missing ------------------------------------------------------------------------------


def _check_names(name: str, function: types.FunctionType, definition: str) -> None:
    used: set[str] = set()
    defined: set[str] = set()
    _collect(compile(definition, f"<{name}>", "exec", dont_inherit=True), used, defined)
    # The builtins of every interpreter, without the builtins that a notebook adds.
    own = {
        key
        for key, value in vars(builtins).items()
        if not str(getattr(value, "__module__", "")).startswith("IPython")
    }
    missing = sorted(used - defined - _IN_EVERY_MODULE - own)
    if not missing:
        return
    modules = [one for one in missing if isinstance(function.__globals__.get(one), types.ModuleType)]
    hints: list[str] = []
    if modules:
        names = [(function.__globals__[one].__name__, one) for one in modules]
        imports = "; ".join(f"import {name}" if name == one else f"import {name} as {one}" for name, one in names)
        hints.append(f"write `{imports}` inside the function")
    if len(modules) < len(missing):
        others = ", ".join(one for one in missing if one not in modules)
        hints.append(f"import or define {others} inside the function, or pass values as func_args")
    raise UsageError(
        f"{name} uses names that are not defined in the function: {', '.join(missing)}; only the function itself is "
        "sent to the job",
        hint="; ".join(hints),
    )


def _collect(code: types.CodeType, used: set[str], defined: set[str]) -> None:
    """Find the global names in the code of a module, including its nested code.

    Args:
        code: the code.
        used: receives the names that the code reads.
        defined: receives the names that the code sets.
    """
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
    used |= loaded - own  # leave out the names that the body of a class has defined
    if not is_function and code.co_name == "<module>":
        defined |= own
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _collect(constant, used, defined)


# ---- arguments ------------------------------------------------------------------------------------------------


def source_of(value: Any, where: str, *, _around: tuple[int, ...] = ()) -> str:
    """An ASCII expression that evaluates to an equal value of the same types.

    Args:
        value: a plain value.
        where: the name of the value in messages.

    Raises:
        UsageError: the value is not plain.
    """
    kind = cast("type[Any]", type(value))  # `isinstance` would accept numpy's float64, which is a subclass of float
    if kind in _REPEATABLE:
        return ascii(value)
    if kind is int:
        # Large integers are written in hexadecimal, because Python limits the number of decimal digits in a source.
        return str(value) if abs(value) < 1 << 64 else hex(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float('{value!r}')"
    if kind is complex:
        return f"complex({source_of(value.real, where)}, {source_of(value.imag, where)})"
    if kind in {list, tuple, set, frozenset, dict}:
        if id(value) in _around or len(_around) >= _MOST_DEPTH:
            raise UsageError(f"{where} contains itself, or is nested more than {_MOST_DEPTH} deep")
        return _collection(value, where, (*_around, id(value)))
    shown = getattr(value, "__qualname__", None) or f"{kind.__module__}.{kind.__qualname__}"
    what = "a function" if inspect.isroutine(value) else f"of type {kind.__qualname__}"
    raise UsageError(
        f"{where} is {what} ({shown}), which cannot be sent to a job; accepted: {_ACCEPTED}",
        hint="create it inside the function, and pass only accepted values",
    )


def _collection(value: Any, where: str, around: tuple[int, ...]) -> str:
    if isinstance(value, dict):
        pairs: list[str] = []
        for key, item in cast("dict[Any, Any]", value).items():
            key_text = source_of(key, f"a key of {where}", _around=around)
            pairs.append(f"{key_text}: {source_of(item, f'{where}[{key_text}]', _around=around)}")
        return "{" + ", ".join(pairs) + "}"
    numbered = enumerate(cast("list[Any]", value))
    items = [source_of(item, f"{where}[{number}]", _around=around) for number, item in numbered]
    match value:
        case list():
            return f"[{', '.join(items)}]"
        case tuple():
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        case _:
            return f"{type(value).__name__}([{', '.join(items)}])"


def as_options(arguments: Mapping[str, Any] | None) -> list[str]:
    """Arguments as command line options: `{"lr": 1e-4, "fp16": True}` → `--lr 0.0001 --fp16`.

    Raises:
        UsageError: a name or a value cannot be an option.
    """
    options: list[str] = []
    for name, value in (arguments or {}).items():
        if not name or name != name.strip() or "=" in name:
            raise UsageError(f"func_args has {name!r}, which is not a valid option name")
        options.append(f"--{name}")
        if value is True:
            continue
        for item in cast("list[Any]", value if isinstance(value, (list, tuple)) else [value]):
            if type(item) not in {str, int, float}:
                raise UsageError(
                    f"func_args[{name!r}] is {value!r}, which cannot be an option value",
                    hint="use strings, numbers, lists of these, or True for an option without a value",
                )
            options.append(str(item))
    return options
