"""Commands that are imported when they are used, and which of them a command line names.

Until then the group has a `LazyCommand` in the place of each: its name, its module and one line of help. That is
enough for `safepoint --help`, for a shell that completes names, and for "did you mean". The command itself is
imported when it runs, when its own help is asked for, and when its options are completed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

Command = TyperCommand | TyperGroup


class LazyCommand(TyperCommand):
    """A command or a group of commands that is not imported yet.

    Args:
        name: as it is typed.
        target: `module:name` of the function that is the command, or of the `typer.Typer` that is the group.
        summary: its line in `safepoint --help`, equal to the first line of its own help.
    """

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self._target = target

    def load(self) -> Command:
        """Import it."""
        module, _, attribute = self._target.partition(":")
        found: Any = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(self.name)(found)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        # Everything behind the first argument belongs to the user's program, options included.
        command.allow_interspersed_args = all(param.name != "program" for param in command.params)
        keep_pydantic_out(command)
        return command


class LazyGroup(TyperGroup):
    """A group in which commands may be lazy."""

    def load(self, *names: str) -> Command:
        """The command that these names lead to, imported; the group itself without names.

        Raises:
            KeyError: there is none.
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
        """See `click.Group`: called when a certain command is run, explained or completed."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest


def walk(root: LazyGroup, *names: str) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Every command below these names, all of them imported, with its own names; groups are left out."""
    command = root.load(*names)
    if isinstance(command, TyperCommand):
        yield names, command
    else:
        for name in list(command.commands):
            yield from walk(root, *names, name)


def keep_pydantic_out(command: Command) -> None:
    """Give flags without a default the default False: for None, Typer imports pydantic, which takes 0.1 s."""
    for param in command.get_params(typer.Context(command)):
        if isinstance(param, TyperOption) and param.is_bool_flag:
            param.default = param.default or False


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One call of `safepoint`.

    Args:
        root: all commands.
        arguments: what was typed behind `safepoint`.
        names: the names of the command; empty when the arguments name none.
        options: the command's options that were typed, with all their names, such as `-v` and `--verbose`.
    """

    root: LazyGroup
    arguments: Sequence[str]
    names: tuple[str, ...]
    options: frozenset[str]

    @classmethod
    def of(cls, root: LazyGroup, arguments: Sequence[str]) -> "Invocation":
        """Read the arguments; the command is imported."""
        names: tuple[str, ...] = ()
        rest = list(arguments)
        while isinstance(command := root.load(*names), TyperGroup):
            name = next((argument for argument in rest if not argument.startswith("-")), "")
            if name not in command.commands:
                # There is no such command; a caller that passes --json still reads JSON.
                return cls(root=root, arguments=arguments, names=(), options=frozenset(rest))
            names, rest = (*names, name), rest[rest.index(name) + 1 :]
        return cls(root=root, arguments=arguments, names=names, options=typed_options(command, rest))

    @property
    def asks_for_json(self) -> bool:
        """Whether `--json` was passed to Safepoint; the program that is run may have such an option, too."""
        return "--json" in self.options


def typed_options(command: Command, arguments: Sequence[str]) -> frozenset[str]:
    """The names of the options that `arguments` set; unknown options are ignored, and so are a program's own."""
    context = typer.Context(command, resilient_parsing=True, ignore_unknown_options=True)
    values, _, _ = command.make_parser(context).parse_args(list(arguments))
    options = [param for param in command.get_params(context) if isinstance(param, TyperOption)]
    typed = [option for option in options if option.name in values]
    return frozenset(name for option in typed for name in (*option.opts, *option.secondary_opts))
