"""`safepoint plan …`: computes storage, cost and checkpoint interval before a run."""

import typer

from safepoint.cli.commands.plan.cost import cost
from safepoint.cli.commands.plan.interval import interval
from safepoint.cli.commands.plan.simulate import simulate
from safepoint.cli.commands.plan.storage import storage

app = typer.Typer(
    name="plan",
    help="Compute storage, cost and checkpoint interval before a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("storage")(storage)
app.command("interval")(interval)
app.command("cost")(cost)
app.command("simulate")(simulate)
