"""`holdfast watch`: the jobs, live."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.jobs.local import LocalJobs
    from holdfast.jobs.records import JobRecord

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 60


def watch(
    name: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="One job; all that are active when none is named.")
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Look this often.", min=0.1)] = 1.0,
) -> None:
    """Show jobs as they go, with the curve of the loss; Ctrl-C ends it, and stops no job.

    Watching one job ends with the job.
    """
    from rich.console import Console
    from rich.live import Live

    from holdfast.foundation import clock
    from holdfast.jobs.local import LocalJobs

    console = Console()
    if not console.is_terminal:
        raise UsageError("watch needs a terminal", hint="use `holdfast list --json` or `holdfast status --json`")
    losses: dict[str, Losses] = {}
    with LocalJobs() as jobs, Live(console=console, auto_refresh=False) as live:
        while True:
            found = [jobs.job(name)] if name else [job for job in jobs.jobs() if job.state.is_active]
            live.update(_picture(found, jobs, losses), refresh=True)
            if name and not found[0].needs_supervisor:
                return
            try:
                clock.sleep(interval)
            except KeyboardInterrupt:
                return


def _picture(found: "Sequence[JobRecord]", jobs: "LocalJobs", losses: "dict[str, Losses]") -> Any:
    from rich.table import Table
    from rich.text import Text

    from holdfast.cli.job_answers import HEAD, row

    picture = Table(box=None, pad_edge=False)
    for title in (*HEAD[:-1], "LOSS CURVE"):
        picture.add_column(title, no_wrap=True)
    for job in found:
        progress = jobs.progress_of(job)
        curve = losses.setdefault(job.name, Losses())
        if progress is not None and progress.loss is not None:
            curve.add(progress.step, progress.loss)
        picture.add_row(*row(job, progress)[:-1], Text(sparkline(curve.values)))
    return picture if found else Text("no active jobs")


class Losses:
    """The losses that were seen, the newest of each step."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=_POINTS)

    def add(self, step: int, loss: float) -> None:
        """Note the loss that was last told at `step`."""
        if self._points and self._points[-1][1] == loss:
            return  # not told anew
        self._points.append((step, loss))

    @property
    def values(self) -> list[float]:
        """Oldest first."""
        return [loss for _, loss in self._points]


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, its height between the lowest and the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


__all__ = ["Losses", "sparkline", "watch"]
