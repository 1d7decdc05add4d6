"""The `holdfast` command."""

import sys
from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli import checkpoints
from holdfast.cli.run import run
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Keeps model training alive: agreed checkpoints on preemption, verified resume, no code changes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keeps model training alive: agreed checkpoints on preemption, verified resume, no code changes."""


app.command(
    "run",
    # Everything behind SCRIPT is the script's own, also what looks like an option of ours.
    context_settings={"allow_interspersed_args": False},
)(run)
app.add_typer(checkpoints.app)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
