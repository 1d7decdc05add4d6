"""The `safepoint` command."""

import sys
from typing import Annotated

import typer
import typer.main

from safepoint._version import __version__
from safepoint.cli.failures import run_command
from safepoint.cli.lazy import LazyCommand, LazyGroup, keep_pydantic_out
from safepoint.foundation.environment import forget_service_links

_SUMMARY = "Save PyTorch training runs when they are interrupted, and resume them."
_COMMANDS = (
    ("run", "run:run", "Run an unchanged training script so that it can be interrupted and resumed."),
    ("submit", "submit:submit", "Run a training script in the background, as a job."),
    ("list", "jobs:list_", "List the jobs, newest first: state, progress, time left, loss and saved step."),
    ("status", "jobs:status", "Show one job: its command, progress, output location and attempts."),
    ("watch", "watch:watch", "Show jobs live, with a plot of the loss."),
    ("logs", "jobs:logs", "Print the output of a job's launchers and ranks."),
    ("events", "jobs:events", "Print the events of a job, oldest first, with the cause of each."),
    ("suspend", "jobs:suspend", "Save a checkpoint and stop a job; `resume` continues from it."),
    ("resume", "jobs:resume", "Continue a suspended or failed job from its newest checkpoint, or from an older one."),
    ("scale", "jobs:scale", "Change a job's number of nodes; a running job is suspended and resumed."),
    ("delete", "jobs:delete", "Stop a job and remove it from the list; its checkpoints stay."),
    ("dashboard", "dashboard:dashboard", "Show jobs and checkpoints in a browser, and act on them."),
    (
        "checkpoints",
        "checkpoints:app",
        "List, check, copy and prune checkpoints in folders, object stores and claims.",
    ),
    ("freeze", "images.freeze:freeze", "Freeze a job, or a process and all its child processes, into an image."),
    (
        "thaw",
        "images.freeze:thaw",
        "Restore the frozen processes of a job or of an image, and let them continue.",
    ),
    ("images", "images.images:app", "List, show, check, copy and delete process images."),
    ("config", "config:app", "Show which settings are in effect and where they are set."),
    ("plan", "plan:app", "Compute storage, cost and checkpoint interval before a run."),
    ("pack", "pack:pack", "Write the modules of Safepoint that a pod needs into one file."),
    ("doctor", "doctor:doctor", "Check that this machine and an output location are ready for a run."),
)
"""Name, `module:function` and summary of each command, in the order of `safepoint --help`."""

app = typer.Typer(
    name="safepoint",
    cls=LazyGroup,
    help=_SUMMARY,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"safepoint {__version__}")
        raise typer.Exit


@app.callback(help=_SUMMARY)
def safepoint(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of `safepoint` itself."""


def root() -> LazyGroup:
    """The group of all commands, as Typer's parser needs it."""
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    for name, target, summary in _COMMANDS:
        group.add_command(LazyCommand(name, f"safepoint.cli.commands.{target}", summary))
    keep_pydantic_out(group)
    return group


def main() -> None:
    """Entry point of the console script."""
    forget_service_links()
    sys.exit(run_command(root(), sys.argv[1:]))


if __name__ == "__main__":
    main()
