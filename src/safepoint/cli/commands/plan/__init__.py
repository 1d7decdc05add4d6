"""`safepoint plan …`: computes storage, cost and checkpoint interval before a run."""

import typer

from safepoint.cli.commands.plan.command import PlanCommand
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
app.command("storage", cls=PlanCommand)(storage)
app.command("interval", cls=PlanCommand)(interval)
app.command("cost", cls=PlanCommand)(cost)
app.command("simulate", cls=PlanCommand)(simulate)
