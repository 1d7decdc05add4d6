"""The `safepoint` command."""

import sys
from typing import Annotated

import typer
import typer.main

from safepoint._version import __version__
from safepoint.cli.failures import run_command
from safepoint.cli.lazy import CommandGroup, LazyCommand, LazyGroup
from safepoint.foundation.service_links import forget_service_links

_SUMMARY = "Keeps model training alive: agreed checkpoints on preemption, verified resume, no code changes."


class _Safepoint(LazyGroup):
    """All commands, in the order of `safepoint --help`."""

    lazy_commands = (
        LazyCommand(
            name="run",
            target="safepoint.cli.commands.run:run",
            summary="Run a training script that survives preemption.",
            has_program=True,
        ),
        LazyCommand(
            name="submit",
            target="safepoint.cli.commands.submit:submit",
            summary="Run a training script in the background, as a job.",
            has_program=True,
        ),
        LazyCommand(
            name="list",
            target="safepoint.cli.commands.jobs:list_",
            summary="List the jobs, newest first: state, step, time left, loss, what is safe.",
        ),
        LazyCommand(
            name="status",
            target="safepoint.cli.commands.jobs:status",
            summary="Show one job: what it runs, where it is, what is safe, how its attempts ended.",
        ),
        LazyCommand(
            name="watch",
            target="safepoint.cli.commands.watch:watch",
            summary="Show jobs as they go, with the curve of the loss; Ctrl-C ends it, and stops no job.",
        ),
        LazyCommand(
            name="logs",
            target="safepoint.cli.commands.jobs:logs",
            summary="Print what the job's processes have printed; with several, each line says which.",
        ),
        LazyCommand(
            name="events",
            target="safepoint.cli.commands.jobs:events",
            summary="Print what was done to the job and what it did, in the order of time: who, what, why.",
        ),
        LazyCommand(
            name="suspend",
            target="safepoint.cli.commands.jobs:suspend",
            summary="Stop a job with a checkpoint, and say which one is safe; `resume` goes on from there.",
        ),
        LazyCommand(
            name="resume",
            target="safepoint.cli.commands.jobs:resume",
            summary="Let a suspended or failed job go on from its newest checkpoint.",
        ),
        LazyCommand(
            name="scale",
            target="safepoint.cli.commands.jobs:scale",
            summary="Change a job's number of nodes: suspend, change, resume.",
        ),
        LazyCommand(
            name="delete",
            target="safepoint.cli.commands.jobs:delete",
            summary="Stop a job and forget it; its checkpoints stay, unless they are asked for too.",
        ),
        LazyCommand(
            name="checkpoints",
            target="safepoint.cli.commands.checkpoints:app",
            summary="Look at, check, copy and tidy checkpoints, in a folder or an object store.",
        ),
        LazyCommand(
            name="config",
            target="safepoint.cli.commands.config:app",
            summary="Show which settings are in effect, and where they come from.",
        ),
        LazyCommand(
            name="doctor",
            target="safepoint.cli.commands.doctor:doctor",
            summary="Check this machine and the place for checkpoints, before a training relies on them.",
        ),
    )


app = typer.Typer(
    name="safepoint",
    cls=_Safepoint,
    help=_SUMMARY,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"safepoint {__version__}")
        raise typer.Exit


@app.callback(help=_SUMMARY)
def safepoint(
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
    forget_service_links()
    sys.exit(run_command(root(), sys.argv[1:]))


if __name__ == "__main__":
    main()
