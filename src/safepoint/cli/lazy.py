"""Commands that are imported when they are used, and that take their defaults from files.

How it works: `LazyGroup` knows of each command its name, where it is, and one line of help: enough for
`safepoint --help`, for completing names in a shell, and for "did you mean". Only when a certain command is to run, to
be explained (`COMMAND --help`) or to have its options completed, `resolve_command` imports it; from there on it is
what Typer makes of it, with everything in it.

`CommandGroup` is every group: when one of its commands is about to run, it looks into the files for that command's
options and hands them to Typer as `default_map`, below options and variables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from safepoint.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """One command or group of commands, not imported yet.

    Args:
        name: what is typed.
        target: `module:name` of the function that is the command, or of the `typer.Typer` that is the group.
        summary: the line of `safepoint --help`, the same as the first line of the command's own help.
        has_program: everything behind the first argument is a program's own, also what looks like an option.
    """

    name: str
    target: str
    summary: str
    has_program: bool = False

    def load(self) -> TyperCommand | TyperGroup:
        """Import it."""
        module, _, attribute = self.target.partition(":")
        found: Any = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            _take_over(found)
            return typer.main.get_group(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        settings = {"allow_interspersed_args": False} if self.has_program else {}
        app.command(self.name, cls=_Command, context_settings=settings)(found)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        return command


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _light(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A group whose commands take defaults from files."""

    def get_params(self, ctx: Any) -> list[Any]:
        """See `click.Command`."""
        return _light(super().get_params(ctx))

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """The command of that name, whole.

        Raises:
            KeyError: there is none.
        """
        command = self.commands[name]
        assert isinstance(command, TyperCommand | TyperGroup)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """See `click.Group`: called when a certain command is run, explained or completed."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        command = self.load(name)
        if not ctx.resilient_parsing and isinstance(command, TyperCommand):
            ctx.default_map = {name: _defaults(command, (*_path(ctx), name), ctx.find_root().command, rest)}
        return name, command, rest


class LazyGroup(CommandGroup):
    """A group of commands that are not imported before they are needed; subclasses list them."""

    lazy_commands: ClassVar[tuple[LazyCommand, ...]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._waiting = {command.name: command for command in self.lazy_commands}
        for command in self.lazy_commands:
            self.add_command(TyperCommand(command.name, short_help=command.summary, add_help_option=False))

    def is_waiting(self, name: str) -> bool:
        """Whether the command is not imported yet, and nothing is known of its options."""
        return name in self._waiting

    def load(self, name: str) -> TyperCommand | TyperGroup:
        """See `CommandGroup`."""
        if name in self._waiting:
            self.commands[name] = self._waiting.pop(name).load()
        return super().load(name)


def _light(params: list[Any]) -> list[Any]:
    """Typer's own flags with a value: for one that has none it imports pydantic, for a tenth of a second."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_bool_flag and not param.expose_value:
            param.default = param.default or False
    return params


def _take_over(app: typer.Typer) -> None:
    """Make groups of ours of what Typer makes of `app`, and of the groups in it."""
    app.info.cls = CommandGroup
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _take_over(group.typer_instance)


def _defaults(
    command: TyperCommand, path: tuple[str, ...], root: CommandGroup, arguments: Sequence[str]
) -> dict[str, Any]:
    from safepoint.cli.defaults import defaults_from_files

    try:
        return defaults_from_files(command, path, root)
    except UsageError:
        if "--help" in own_options(command, arguments):  # it must work when nothing else does
            return {}
        raise


def _path(context: Any) -> tuple[str, ...]:
    """The names from the root, which has none, to the command of this context."""
    return () if context.parent is None else (*_path(context.parent), context.info_name)


def own_options(command: TyperCommand | TyperGroup, arguments: Sequence[str]) -> Iterator[str]:
    """The options among `arguments` that are the command's: no values, and nothing of a program's own."""
    options = [param for param in command.params if isinstance(param, TyperOption)]
    takes_value = {name for option in options if not (option.is_flag or option.count) for name in option.opts}
    is_mixed = command.context_settings.get("allow_interspersed_args", command.allow_interspersed_args)
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            return
        if not argument.startswith("-") or argument == "-":
            if not is_mixed:
                return
            continue
        name, is_joined, _ = argument.partition("=")
        yield name
        if name in takes_value and not is_joined:
            next(remaining, None)


def walk(group: CommandGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Every command that runs something, with its names, all of them imported."""
    for name in list(group.commands):
        command = group.load(name)
        if isinstance(command, CommandGroup):
            yield from walk(command, (*path, name))
        elif isinstance(command, TyperCommand):
            yield (*path, name), command
