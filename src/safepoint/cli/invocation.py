"""Which command a command line names, and which of its arguments are options of that command."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typer.core import TyperGroup, TyperOption

from safepoint.cli.lazy import Command, LazyGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One call of `safepoint`.

    Args:
        root: all commands.
        arguments: what was typed behind `safepoint`.
        names: the names of the command, as far as there is one.
        options: its options that were typed, such as `--json`; not their values, and nothing behind SCRIPT.
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
                return cls(root=root, arguments=arguments, names=names, options=frozenset(rest))
            names, rest = (*names, name), rest[rest.index(name) + 1 :]
        return cls(root=root, arguments=arguments, names=names, options=frozenset(own_options(command, rest)))

    @property
    def command(self) -> Command:
        """The command, or the group whose command was not named."""
        return self.root.load(*self.names)

    @property
    def asks_for_json(self) -> bool:
        """Whether `--json` was passed to Safepoint; the program that is run may have such an option, too."""
        return "--json" in self.options


def own_options(command: Command, arguments: Sequence[str]) -> Iterator[str]:
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
