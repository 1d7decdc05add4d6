"""`safepoint plan …`: what a run will need, computed before it starts."""

import typer

from safepoint.cli.commands.plan.storage import storage

app = typer.Typer(
    name="plan",
    help="Compute storage, cost and checkpoint interval before a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def plan() -> None:
    """Keeps `plan` a group: without this callback, Typer would replace a group of one command by the command."""


app.command()(storage)
