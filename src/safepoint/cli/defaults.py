"""The options of a command, and what settings files and variables say of them.

An option is set by itself, else by its variable, else by the first file that names it, else by its default. Not in
files: `--json`, because a program that reads an answer must not depend on files that it does not know, and flags that
neither a variable nor a `--no-…` could take back.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from safepoint.cli.lazy import CommandGroup, LazyGroup, walk
from safepoint.errors import UsageError
from safepoint.foundation.configuration import RESERVED, Configuration, Setting, Table
from safepoint.foundation.units import nearest

_CLAIMS = "SAFEPOINT_PVC_MOUNTS"
_SHARED: dict[tuple[str, ...], tuple[str, ...]] = {("submit",): ("run",)}
"""A job is a run: what the table of `run` says is meant for both; what only `run` has does not matter to `submit`."""
_NOT_IN_FILES = ("json",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """What an option is when it is not typed.

    Args:
        option: its name, without dashes in front.
        value: as the command gets it.
        default: what it would be without files and variables.
        source: `environment`, `file` or `default`.
        origin: the variable, or the place in a file; empty for a default.
    """

    option: str
    value: object
    default: object
    source: str
    origin: str


def options(command: TyperCommand) -> dict[str, TyperOption]:
    """The options that files can set, by their names without dashes in front."""
    return {name: option for name, option in _named(command).items() if not _is_only_typed(name, option)}


def _named(command: TyperCommand) -> dict[str, TyperOption]:
    found: dict[str, TyperOption] = {}
    for param in command.params:
        if isinstance(param, TyperOption):
            name = next((opt[2:] for opt in param.opts if opt.startswith("--")), "")
            found.update({name: param} if name else {})
    return found


def _is_only_typed(name: str, option: TyperOption) -> bool:
    return name in _NOT_IN_FILES or (option.is_flag and not (option.secondary_opts or option.envvar))


def defaults_from_files(command: TyperCommand, path: Sequence[str], root: TyperGroup) -> dict[str, Any]:
    """What files say of the options of `command`, for Typer's `default_map`; claims are made known to storage.

    Args:
        command: it is about to run.
        path: its names, such as `("checkpoints", "list")`.
        root: knows all commands.

    Raises:
        UsageError: a file cannot be read, or what it says of this command or of none cannot be meant.
    """
    configuration = Configuration.load()
    for table in configuration.tables:
        _check_table(table, root)
    _check_shared(command, path, root, configuration)
    found = {options(command)[name].name: value for name, (value, _) in _values(command, path, configuration).items()}
    _make_known(configuration)
    return found


def _check_shared(command: TyperCommand, path: Sequence[str], root: TyperGroup, configuration: Configuration) -> None:
    """What a shared table says and this command has not must mean something to the table's own command."""
    shared = _SHARED.get(tuple(path))
    if shared is None or not configuration.settings(*shared).keys() - options(command).keys():
        return
    owner: Any = root
    for name in shared:
        owner = owner.load(name)
    _values(owner, shared, configuration)


def effective(command: TyperCommand, path: Sequence[str], configuration: Configuration) -> Iterator[Effective]:
    """Every option of `command`.

    Raises:
        UsageError: a file or a variable says what cannot be meant.
    """
    values = _values(command, path, configuration)
    for name, option in options(command).items():
        context = typer.Context(command, info_name=path[-1])
        default = None if option.required else _plain(option.process_value(context, option.get_default(context)))
        variable = _variable(option)
        if variable is not None:
            try:
                value = _plain(option.process_value(context, option.value_from_envvar(context)))
            except typer.BadParameter as error:
                raise UsageError(
                    f"{variable}={os.environ[variable]!r} cannot be meant: {error.message}",
                    hint="correct or unset it",
                ) from error
            yield Effective(option=name, value=value, default=default, source="environment", origin=variable)
        elif name in values:
            text, setting = values[name]
            value = _plain(option.process_value(context, text))
            yield Effective(option=name, value=value, default=default, source="file", origin=setting.place)
        else:
            yield Effective(option=name, value=default, default=default, source="default", origin="")


def origins(command: TyperCommand, path: Sequence[str]) -> dict[str, str]:
    """For every option that is not left at its default, as `--name`, where it is set.

    Raises:
        UsageError: as for `effective`.
    """
    found = effective(command, path, Configuration.load())
    return {f"--{item.option}": item.origin for item in found if item.origin}


def check_tables(configuration: Configuration, root: CommandGroup) -> None:
    """Whether every table of the files is a command's, all commands imported.

    Raises:
        UsageError: one is not, or a key of it is no option.
    """
    commands = dict(walk(root))
    for table in configuration.tables:
        _check_table(table, root)
        if table.name in commands:
            _values(commands[table.name], table.name, configuration)


def _check_table(table: Table, root: TyperGroup) -> None:
    """Whether there is a command of that name, as far as it can be told without importing more."""
    command: Any = root
    for index, part in enumerate(table.name):
        if not isinstance(command, TyperGroup):
            parent = " ".join(table.name[:index])
            raise table.refuse(f"`{parent}` has no commands in it", hint=f"write its options below [{parent}]")
        if part not in command.commands:
            tables = [*command.commands, *(RESERVED if index == 0 else ())]
            raise table.refuse("there is no such command", hint=nearest(part, tables))
        if isinstance(command, LazyGroup) and command.is_waiting(part):
            return
        command = command.commands[part]
    if isinstance(command, TyperGroup) and table.settings:
        name = ".".join(table.name)
        raise table.settings[0].refuse(
            f"`{name}` is several commands", hint=f"name one of them: [{name}.{next(iter(command.commands))}]"
        )


def _values(
    command: TyperCommand, path: Sequence[str], configuration: Configuration
) -> dict[str, tuple[Any, Setting]]:
    """The values that files set, as a variable would say them, by option."""
    known = options(command)
    found: dict[str, tuple[Any, Setting]] = {}
    own = configuration.settings(*path)
    shared = configuration.settings(*_SHARED[tuple(path)]) if tuple(path) in _SHARED else {}
    for name, setting in {**{name: shared[name] for name in shared if name in known}, **own}.items():
        typed = _named(command)
        if name in typed and name not in known:
            why = "a file cannot set it, because the command line could not take it back"
            raise setting.refuse(why, hint=f"type --{name} where you want it")
        if name not in known:
            raise setting.refuse(f"`{' '.join(path)}` has no such option", hint=nearest(name, known))
        found[name] = (_value(setting, known[name], typer.Context(command, info_name=path[-1])), setting)
    return found


def _value(setting: Setting, option: TyperOption, context: typer.Context) -> Any:
    value: Any = setting.value
    if option.is_flag != isinstance(value, bool):
        hint = "write true or false" if option.is_flag else "write its value, not true or false"
        raise setting.refuse("it has the wrong type", hint=hint)
    if option.multiple != isinstance(value, list):
        hint = "write a list, in brackets" if option.multiple else "write one value, without brackets"
        raise setting.refuse("it has the wrong type", hint=hint)
    # As a variable would say it: Typer converts and checks both alike.
    text: Any = value
    if not isinstance(value, bool):
        texts = [_text(item, setting) for item in _items(value)]
        text = texts if option.multiple else texts[0]
    try:
        meant: Any = option.process_value(context, text)
    except typer.BadParameter as error:
        raise setting.refuse(
            error.message.rstrip("."), hint=f"see `safepoint {' '.join(setting.table)} --help`"
        ) from error
    for item, result in zip(_items(value), _items(meant), strict=False):
        if isinstance(item, str) and isinstance(result, int | float):
            raise setting.refuse("it has the wrong type", hint="write the number without quotation marks")
    return text


def _plain(value: Any) -> object:
    """As TOML and JSON know it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _items(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]


def _text(value: object, setting: Setting) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise setting.refuse("it has the wrong type", hint="write text in quotation marks, or a number")
    return str(value)


def _variable(option: TyperOption) -> str | None:
    """The variable that sets the option now."""
    names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    return next((name for name in names if os.environ.get(name)), None)


def _make_known(configuration: Configuration) -> None:
    """Claims with a folder here, for whatever is started; what is set stays."""
    pairs = [f"{claim}={folder}" for claim, folder in configuration.pvc.items()]
    if pairs:
        already = os.environ.get(_CLAIMS, "")
        os.environ[_CLAIMS] = ",".join([*pairs, *([already] if already else [])])
