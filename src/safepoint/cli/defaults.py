"""The values that settings files and variables give to the options of a command.

The value of an option comes from the first source that sets the option. The order of the sources is: the command
line, the option's environment variable, the settings files in their order, the default. `submit` also reads the table
`[run]`, and with `--on NAME` the table `[places.NAME]`. `[places.NAME]` overrides `[submit]`, and `[submit]`
overrides `[run]`, even if these tables are in different files.

A file cannot set `--json`, because programs rely on the form of the output. A file also cannot set a flag that has no
variable and no form `--no-…`, because a user could not override the file.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from safepoint.cli.lazy import Command, Invocation, LazyCommand, LazyGroup
from safepoint.cli.output import print_warning
from safepoint.errors import UsageError
from safepoint.foundation.configuration import RESERVED, Configuration, Setting
from safepoint.foundation.units import nearest

_CLAIMS = "SAFEPOINT_PVC_MOUNTS"
_CORRECT_VARIABLE = "correct or unset the variable"
_SUBMIT, _PLACES = ("submit",), "places"
_KINDS: dict[Any, str] = {int: "integer", float: "float", bool: "boolean"}
_NUMBERS = {"integer": "a whole number", "float": "a number"}
_SHARED: dict[tuple[str, ...], tuple[str, ...]] = {("submit",): ("run",)}
"""The commands that also read the table of another command.

In that table, options that the reading command does not have are ignored.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The value of an option that is not on the command line.

    Args:
        option: its name, without leading dashes.
        value: the value that the command receives.
        default: the value without files and variables.
        source: what sets the value: `environment`, `file` or `default`.
        origin: the name of the variable, or the file and the line; empty for a default.
    """

    option: str
    value: object
    default: object
    source: str
    origin: str


def default_map(invocation: Invocation) -> dict[str, Any]:
    """Return Typer's `default_map` from the settings files.

    The folders that these files set for `pvc://` claims are added to the variable SAFEPOINT_PVC_MOUNTS.

    With `--help`, invalid files are ignored.

    Raises:
        UsageError: a file cannot be read, has a table whose name is not a command, or sets an option of this command
            to an invalid value.
    """
    try:
        configuration = Configuration.load()
        if "--help" not in invocation.options:
            for warning in configuration.ignored:
                print_warning(warning)
        check_tables(configuration, invocation.root)
        check_places(configuration, invocation.root)
        place = place_of(invocation, configuration)
        values = _file_values(invocation.root, invocation.names, configuration, place=place)
    except UsageError:
        if "--help" in invocation.options:
            return {}
        raise
    _make_claims_known(configuration)
    options = _options(invocation.root.load(*invocation.names))
    defaults: dict[str, Any] = {options[name].name: text for name, (text, _) in values.items()}
    for name in reversed(invocation.names):
        defaults = {name: defaults}
    return defaults


def place_of(invocation: Invocation, configuration: Configuration) -> str | None:
    """The value of `--on` for `submit`, from the command line or a file. None if `--on` is not set, and for other
    commands."""
    if invocation.names != _SUBMIT:
        return None
    if (typed := invocation.options.get("--on")) is not None:
        return typed
    return _file_values(invocation.root, _SUBMIT, configuration).get("on", (None, None))[0]


def _place_values(root: LazyGroup, configuration: Configuration, name: str) -> dict[str, tuple[Any, Setting]]:
    """The options of `submit` that `[places.NAME]` sets.

    Raises:
        UsageError: the table sets an option that `submit` does not have, or an invalid value.
    """
    place = configuration.places.get(name)
    options = _options(root.load(*_SUBMIT))
    return {setting.name: _value(setting, options, "a place") for setting in place.settings} if place else {}


def check_places(configuration: Configuration, root: LazyGroup) -> None:
    """Check the options that places set. Without this check, a command could ignore a mistyped option such as
    `contxt`, and use the wrong cluster.

    Raises:
        UsageError: `submit` does not have the option, or the value is invalid.
    """
    for place in configuration.places.values():
        if place.settings:  # without settings, `submit` need not be imported
            _place_values(root, configuration, place.name)


def effective(
    root: LazyGroup, names: tuple[str, ...], configuration: Configuration, *, place: str | None = None
) -> Iterator[Effective]:
    """Yield the options of a command that files can set, with the values that are in effect.

    Args:
        root: the group of all commands.
        names: the names of the command, such as `checkpoints` and `list`.
        configuration: the settings files.
        place: for `submit`, the value of `--on`.

    Raises:
        UsageError: a file or a variable sets an invalid value.
    """
    values = _file_values(root, names, configuration, place=place)
    command = root.load(*names)
    context = typer.Context(command, info_name=names[-1])
    for name, option in _options(command).items():
        if _is_only_typed(name, option):
            continue
        default = None if option.required else _plain(option.process_value(context, option.get_default(context)))
        value, source, origin = default, "default", ""
        if variable := _variable(option):
            try:
                value = _plain(option.process_value(context, option.value_from_envvar(context)))
            except typer.BadParameter as error:
                what = requirement(option) or f"is invalid: {error.message}"
                message = f"{variable}={os.environ[variable]!r} {what}"
                raise UsageError(message, hint=_CORRECT_VARIABLE) from error
            source, origin = "environment", variable
        elif name in values:
            text, setting = values[name]
            value, source, origin = _plain(option.process_value(context, text)), "file", setting.place
        yield Effective(option=name, value=value, default=default, source=source, origin=origin)


def origins_of(context: typer.Context, names: tuple[str, ...]) -> dict[str, str]:
    """What sets each option of a running command: the option itself, a variable, or a file with its line.

    Options that have their defaults are left out.

    Args:
        context: the context of the command.
        names: the names of the command, such as `submit`.
    """
    root: Any = context.find_root().command
    found: dict[str, str] = {}
    files: dict[str, tuple[Any, Setting]] | None = None
    for name, option in _options(root.load(*names)).items():
        source = context.get_parameter_source(str(option.name))
        if source is not None and source.name == "DEFAULT_MAP":
            files = _file_values(root, names, Configuration.load()) if files is None else files
            found[name] = files[name][1].place if name in files else "a settings file"
        elif source is not None and source.name in {"COMMANDLINE", "ENVIRONMENT"}:
            found[name] = (source.name == "ENVIRONMENT" and _variable(option)) or f"--{name}"
    return found


def check_tables(configuration: Configuration, root: LazyGroup) -> None:
    """Check that every table of the files has the name of a command.

    Subcommands of a group that is not imported yet are not checked.

    Raises:
        UsageError: a table does not have the name of a command.
    """
    for table in configuration.tables:
        command: Any = root
        for index, name in enumerate(table.name):
            if isinstance(command, LazyCommand):
                break
            if not isinstance(command, TyperGroup):
                parent = " ".join(table.name[:index])
                raise table.refuse(
                    f"`{parent}` is a single command without subcommands", hint=f"write its options below [{parent}]"
                )
            if name not in command.commands:
                tables = [*command.commands, *(RESERVED if index == 0 else ())]
                raise table.refuse("there is no such command", hint=nearest(name, tables))
            command = command.commands[name]
        if isinstance(command, TyperGroup) and table.settings:
            group = ".".join(table.name)
            raise table.settings[0].refuse(
                f"`{group}` is a group of commands",
                hint=f"write the table of one of them, such as [{group}.{next(iter(command.commands))}]",
            )


def _file_values(
    root: LazyGroup, names: tuple[str, ...], configuration: Configuration, *, place: str | None = None
) -> dict[str, tuple[Any, Setting]]:
    """The values that files set for a command, by option.

    The command's own table overrides a table of `_SHARED`, and the table of a place overrides both.
    """
    own = _options(root.load(*names))
    found: dict[str, tuple[Any, Setting]] = {}
    for table in filter(None, (_SHARED.get(names), names)):
        known = _options(root.load(*table))
        for name, setting in configuration.settings(*table).items():
            value = _value(setting, known, f"`{' '.join(table)}`")
            if name in own:
                found[name] = value
    return found if place is None else found | _place_values(root, configuration, place)


def _value(setting: Setting, known: dict[str, TyperOption], owner: str) -> tuple[Any, Setting]:
    """Check the value of a setting, and return it in the form that Typer takes, with the setting."""
    if setting.name not in known or (setting.name == "on" and setting.table[0] == _PLACES):
        settable = [name for name, option in known.items() if not _is_only_typed(name, option)]
        keys = ("context", "namespace", "default") if setting.table[0] == _PLACES else ()
        raise setting.refuse(f"{owner} has no such option", hint=nearest(setting.name, [*keys, *settable]))
    return _text(setting, known[setting.name]), setting


def _options(command: Command) -> dict[str, TyperOption]:
    """The options of a command, by their names without leading dashes."""
    found: dict[str, TyperOption] = {}
    for param in command.params:
        if isinstance(param, TyperOption):
            name = next((opt[2:] for opt in param.opts if opt.startswith("--")), "")
            found.update({name: param} if name else {})
    return found


def _is_only_typed(name: str, option: TyperOption) -> bool:
    return name == "json" or (option.is_flag and not (option.secondary_opts or option.envvar))


def _text(setting: Setting, option: TyperOption) -> Any:
    """The value of a setting as a string, or as a list of strings. The value of a flag stays a bool.

    Typer checks the value, as it checks the value of a variable.
    """
    value: Any = setting.value
    if _is_only_typed(setting.name, option):
        why = "a file cannot set it: neither a variable nor an option could unset it"
        raise setting.refuse(why, hint=f"pass --{setting.name} on the command line instead")
    items, hint = _items(value), ""
    if option.is_flag != isinstance(value, bool):
        hint = "write true or false" if option.is_flag else "write its value, not true or false"
    elif option.multiple != isinstance(value, list):
        hint = "write a list, in brackets" if option.multiple else "write one value, without brackets"
    elif not option.is_flag and any(
        isinstance(item, bool) or not isinstance(item, str | int | float) for item in items
    ):
        hint = "write a string in quotation marks, or a number"
    if hint:
        raise setting.refuse("it has the wrong type", hint=hint)
    texts = items if option.is_flag else [str(item) for item in items]
    text = texts if option.multiple else texts[0]
    try:
        converted: Any = option.process_value(typer.Context(TyperCommand(None)), text)
    except typer.BadParameter as error:
        command = _SUBMIT if setting.table[0] == _PLACES else setting.table
        hint = f"see `safepoint {' '.join(command)} --help`"
        raise setting.refuse(requirement(option) or error.message.rstrip("."), hint=hint) from error
    for item, result in zip(items, _items(converted), strict=False):
        if isinstance(item, str) and isinstance(result, int | float):
            raise setting.refuse("it has the wrong type", hint="write the number without quotation marks")
    return text


def requirement(option: Any) -> str:
    """What the values of an option or an argument have to be, such as `must be a whole number`.

    The text continues a sentence that begins with the value. It is empty if Typer takes any text.
    """
    descriptor: Any = getattr(option, "type_descriptor", None)
    if descriptor is None:  # releases of Typer before 0.28 have Click's types
        limits, kind = option.type, str(option.type.name).partition(" ")[0]
        choices = getattr(option.type, "choices", None)
    else:
        of_items: Any = (*get_args(descriptor.annotation), descriptor.annotation)[0]
        limits, kind = descriptor.parameter_info, _KINDS.get(of_items, "")
        choices = descriptor.choices
    if choices:
        return f"must be one of {', '.join(str(getattr(one, 'value', one)) for one in choices)}"
    if kind == "boolean":
        return "must be true or false"
    if kind not in _NUMBERS:
        return ""
    least, most = getattr(limits, "min", None), getattr(limits, "max", None)
    if least is not None and most is not None:
        return f"must be {_NUMBERS[kind]} from {least:g} to {most:g}"
    if least is not None or most is not None:
        return f"must be {_NUMBERS[kind]} of " + (f"at most {most:g}" if least is None else f"at least {least:g}")
    return f"must be {_NUMBERS[kind]}"


def invalid_value(error: Any, invocation: Invocation) -> UsageError | None:
    """The error for a value that Typer refuses: what was given, where it was set, and what is allowed.

    Args:
        error: the exception of Typer or Click.
        invocation: the call of the command.

    Returns:
        None if the error has another reason than the type of a value.
    """
    param, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if param is None or not getattr(error, "message", "") or not (what := requirement(param)):
        return None
    hint = f"see `{' '.join(context.command_path.split())} --help`" if context is not None else None
    name = next((opt for opt in getattr(param, "opts", ()) if opt in invocation.options), None)
    if name is not None:
        return UsageError(f"{name} {_first_invalid(invocation.options[name], param)!r} {what}", hint=hint)
    if not isinstance(param, TyperOption):
        return UsageError(f"{param.metavar or param.name} {what}", hint=hint)
    if variable := _variable(param):
        return UsageError(f"{variable}={os.environ[variable]!r} {what}", hint=_CORRECT_VARIABLE)
    return UsageError(f"{param.opts[0]} {what}", hint=hint)


def _first_invalid(value: Any, param: Any) -> object:
    """The value that was refused: for an option that may be repeated, the first invalid one."""
    items = _items(value)
    for item in items:
        try:
            param.process_value(typer.Context(TyperCommand(None)), [item] if param.multiple else item)
        except typer.BadParameter:
            return item
    return items[0]


def _plain(value: Any) -> object:
    """The value, converted to types that TOML and JSON have."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _items(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]


def _variable(option: TyperOption) -> str | None:
    """The name of the environment variable that sets the option; None if no variable does."""
    names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    return next((name for name in names if os.environ.get(name)), None)


def _make_claims_known(configuration: Configuration) -> None:
    """Add the folders for claims to SAFEPOINT_PVC_MOUNTS, which this process and its children read.

    Entries that are already in the variable take precedence.
    """
    pairs = [f"{claim}={folder}" for claim, folder in configuration.pvc.items()]
    if pairs:
        already = os.environ.get(_CLAIMS, "")
        os.environ[_CLAIMS] = ",".join([*pairs, *([already] if already else [])])
