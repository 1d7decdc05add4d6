"""`safepoint watch`: shows jobs live."""

import contextlib
import json
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from safepoint.answers.job_documents import job_document
from safepoint.answers.versions import versioned
from safepoint.cli.cluster_options import Namespace, OnOfWatch, open_jobs
from safepoint.cli.commands.jobs import complete_job
from safepoint.cli.job_answers import HEAD, row
from safepoint.cli.output import table
from safepoint.errors import UsageError, without_credentials
from safepoint.jobs.model.job_place import Job, JobPlace
from safepoint.presentation.drawings import heights

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 500
_CURVE = "LOSS CURVE"
_GAP = 2


def watch(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]", help="The job to show. Without JOB: all active jobs.", autocompletion=complete_job
        ),
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two updates.", min=0.1)] = 1.0,
    on: OnOfWatch = None,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON whenever a job changes.")] = False,
) -> None:
    """Show jobs live, with a plot of the loss.

    With a JOB, the command ends when that job stops. Ctrl-C ends the command; the jobs continue.
    """
    if not (as_json or sys.stdout.isatty()):
        raise UsageError("watch needs a terminal, and stdout is not one", hint="use --json, or `safepoint list`")
    show: Any = _Changes() if as_json else _Screen()
    with open_jobs(on, namespace, name) as jobs, contextlib.suppress(KeyboardInterrupt):
        for found in jobs.watch(name, interval_s=interval):
            show(jobs, found)


class _Changes:
    """Prints a JSON document for each job that has changed since it was last printed."""

    def __init__(self) -> None:
        self._printed: dict[str, str] = {}

    def __call__(self, jobs: JobPlace[Any], found: Sequence[Job]) -> None:
        names = {job.name for job in found}
        self._printed = {name: text for name, text in self._printed.items() if name in names}
        for job in found:
            text = without_credentials(json.dumps(versioned(job_document(jobs, job))))
            if self._printed.get(job.name) != text:
                self._printed[job.name] = text
                typer.echo(text)


class _Screen:
    """Prints a table over the previous table on the terminal."""

    def __init__(self) -> None:
        self._losses: dict[str, deque[float]] = {}
        self._width = self._height = 0

    def __call__(self, jobs: JobPlace[Any], found: Sequence[Job]) -> None:
        reports = [jobs.progress_of(job) for job in found]
        names = {job.name for job in found}
        self._losses = {name: losses for name, losses in self._losses.items() if name in names}
        for job, progress in zip(found, reports, strict=True):
            losses = self._losses.setdefault(job.name, deque(maxlen=_POINTS))
            # If the loss is unchanged, there was probably no new report.
            if progress is not None and progress.loss is not None and progress.loss not in list(losses)[-1:]:
                losses.append(progress.loss)
        size = shutil.get_terminal_size()
        rows = [row(job, progress)[:-1] for job, progress in zip(found, reports, strict=True)]
        curves = [list(self._losses[job.name]) for job in found]
        lines = (
            picture(HEAD[:-1], rows, curves, size.columns)
            if rows
            else ["no active jobs; `safepoint list` shows all jobs, and Ctrl-C ends this command"]
        )
        if len(lines) >= size.lines:
            lines = [*lines[: size.lines - 2], f"… and {len(lines) - size.lines + 2} more"]
        # If the width of the terminal has changed, the row at which the previous table begins is unknown: clear the
        # whole terminal.
        back = f"\033[{self._height}F" if self._height and self._width == size.columns else "\033[H\033[2J"
        sys.stdout.write((back if self._width else "") + "".join(f"\033[2K{line}\n" for line in lines) + "\033[J")
        sys.stdout.flush()
        # A long line takes several rows of the terminal.
        self._height = sum(max(1, -(-len(line) // size.columns)) for line in lines)
        self._width = size.columns


def picture(
    head: Sequence[str], rows: Sequence[Sequence[str]], curves: Sequence[Sequence[float]], width: int
) -> list[str]:
    """The table as lines. If the terminal is wide enough, each row ends with a curve of the job's losses.

    Args:
        head: the titles of the columns.
        rows: a row for each job; no cell is shortened.
        curves: the losses of each job, oldest first. If they do not all fit, only the newest ones are shown.
        width: the width of the terminal, in characters.
    """
    lines = table(head, rows)
    begin = max(map(len, lines)) + _GAP
    room = width - begin
    if room < 1:
        return lines
    drawn = [_CURVE if room >= len(_CURVE) else "", *(sparkline(values[-room:]) for values in curves)]
    return [f"{line.ljust(begin)}{curve}".rstrip() for line, curve in zip(lines, drawn, strict=True)]


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, in the same order. The lowest value gets the lowest bar. The highest value gets the
    highest bar. If a value is not finite, there are no bars."""
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights(values))
