"""The class of the commands of `safepoint plan`. It refuses empty values."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from typer.core import TyperArgument, TyperCommand

from safepoint.errors import UsageError


class PlanCommand(TyperCommand):
    """A command whose arguments and options must not be empty or blank.

    An empty value usually comes from a shell variable that is not set. If empty values were accepted, the user would
    get the plan of the current folder, or a plan without the option.
    """

    def invoke(self, ctx: Any) -> Any:
        """Overrides the method of `TyperCommand`. It is called after the values of the parameters were read.

        Raises:
            UsageError: a value is empty.
        """
        for parameter in self.params:
            if any(not text.strip() for text in _texts(ctx.params.get(parameter.name or ""))):
                is_argument = isinstance(parameter, TyperArgument)
                name = parameter.metavar if is_argument else max(parameter.opts, key=len)
                raise UsageError(
                    f"{name} is empty; nothing was computed",
                    hint=f"give {name} a value, or leave it out; if the value is a shell variable, set this variable",
                )
        return super().invoke(ctx)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        yield from (one for one in cast("Sequence[object]", value) if isinstance(one, str))
