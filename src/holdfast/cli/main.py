"""The `holdfast` command."""

import sys
from typing import Annotated

import typer
import typer.main

from holdfast._version import __version__
from holdfast.cli.failures import run_command
from holdfast.cli.lazy import CommandGroup, LazyCommand, LazyGroup

_SUMMARY = "Keeps model training alive: agreed checkpoints on preemption, verified resume, no code changes."


class _Holdfast(LazyGroup):
    """All commands, in the order of `holdfast --help`."""

    lazy_commands = (
        LazyCommand(
            name="run",
            target="holdfast.cli.run:run",
            summary="Run a training script that survives preemption.",
            has_program=True,
        ),
        LazyCommand(
            name="checkpoints",
            target="holdfast.cli.checkpoints:app",
            summary="Look at, check, copy and tidy checkpoints, in a folder or an object store.",
        ),
        LazyCommand(
            name="config",
            target="holdfast.cli.config:app",
            summary="Show which settings are in effect, and where they come from.",
        ),
        LazyCommand(
            name="doctor",
            target="holdfast.cli.doctor:doctor",
            summary="Check this machine and the place for checkpoints, before a training relies on them.",
        ),
    )


app = typer.Typer(
    name="holdfast",
    cls=_Holdfast,
    help=_SUMMARY,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback(help=_SUMMARY)
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Everything is done by the commands."""


def root() -> CommandGroup:
    """The command itself, as Typer's parser sees it."""
    command = typer.main.get_command(app)
    assert isinstance(command, CommandGroup)
    return command


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_command(root(), sys.argv[1:]))


if __name__ == "__main__":
    main()
