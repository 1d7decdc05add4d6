"""Imports a command only when it is used, and finds the command that a command line names.

Before its import, a command is a `LazyCommand`: its name, its module and one line of help. `safepoint --help`, shell
completion of command names, and the suggestion for a mistyped command need only these. A command is imported when it
runs, when it prints its own help, and when the shell completes its options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

Command = TyperCommand | TyperGroup


class LazyCommand(TyperCommand):
    """A command, or a group of commands, that is not imported yet.

    Args:
        name: the name of the command, as a user types it.
        target: `module:name` of the command's function, or of the `typer.Typer` of a group.
        summary: the command's line in `safepoint --help`; it must equal the first line of the command's own help.
    """

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self._target = target

    def load(self) -> Command:
        """Import the command, or the group, and return it."""
        module, _, attribute = self._target.partition(":")
        found: Any = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(self.name)(found)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        # Arguments and options after the name of a program belong to the program.
        command.allow_interspersed_args = all(param.name != "program" for param in command.params)
        keep_pydantic_out(command)
        return command


class LazyGroup(TyperGroup):
    """A group in which commands may be lazy."""

    def load(self, *names: str) -> Command:
        """Import the command with these names, such as `checkpoints` and `list`. Without names, return this group.

        Raises:
            KeyError: there is no such command.
        """
        command: Command = self
        for name in names:
            assert isinstance(command, TyperGroup)
            below: Any = command.commands[name]
            if isinstance(below, LazyCommand):
                below = command.commands[name] = below.load()
            command = below
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Overrides the method of `TyperGroup`. It is called before a command runs, prints its help, or completes its
        options."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest


def walk(root: LazyGroup, *names: str) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Import and yield every command in the group with these names, with its full name. Groups are left out."""
    command = root.load(*names)
    if isinstance(command, TyperCommand):
        yield names, command
    else:
        for name in list(command.commands):
            yield from walk(root, *names, name)


def keep_pydantic_out(command: Command) -> None:
    """Set the default of flags without a default to False.

    For a flag without a default, Typer imports pydantic. This import takes 0.1 s.
    """
    for param in command.get_params(typer.Context(command)):
        if isinstance(param, TyperOption) and param.is_bool_flag:
            param.default = param.default or False


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One call of `safepoint`.

    Args:
        root: the group of all commands.
        arguments: the command line after `safepoint`.
        names: the names of the command's groups, then its own name; empty when the command line names no command.
        options: the typed options with their values. Each option is listed under all its names: `-v` also as
            `--verbose`. If the command line names no command, the mapping has all arguments.
    """

    root: LazyGroup
    arguments: Sequence[str]
    names: tuple[str, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, root: LazyGroup, arguments: Sequence[str]) -> "Invocation":
        """Parse the arguments, and import the command that they name."""
        names: tuple[str, ...] = ()
        rest = list(arguments)
        while isinstance(command := root.load(*names), TyperGroup):
            name = next((argument for argument in rest if not argument.startswith("-")), "")
            if name not in command.commands:
                # There is no such command. A caller that passes --json still expects JSON.
                return cls(root=root, arguments=arguments, names=(), options=dict.fromkeys(rest))
            names, rest = (*names, name), rest[rest.index(name) + 1 :]
        return cls(root=root, arguments=arguments, names=names, options=typed_options(command, rest))

    @property
    def asks_for_json(self) -> bool:
        """Whether `--json` was passed to Safepoint. An option `--json` of the user's program does not count."""
        return "--json" in self.options


def typed_options(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The options that `arguments` set, with their values. Each option is listed under all its names.

    Unknown options, and options of the user's program, are ignored.
    """
    context = typer.Context(command, resilient_parsing=True, ignore_unknown_options=True)
    values, _, _ = command.make_parser(context).parse_args(list(arguments))
    options = [param for param in command.get_params(context) if isinstance(param, TyperOption)]
    typed = [option for option in options if option.name in values]
    return {name: values[option.name] for option in typed for name in (*option.opts, *option.secondary_opts)}
