"""Shows a job as a row of a table, or as a page."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from safepoint.answers.job_documents import safe_step
from safepoint.answers.process_images import image_of
from safepoint.cli.output import table
from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural
from safepoint.jobs.model.job_place import Job, Summary
from safepoint.jobs.model.job_progress import newest_save
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, SpaceRecord

HEAD = ("JOB", "STATE", "AGE", "STEP", "DONE", "LEFT", "LOSS", "SAFE STEP", "COMMAND")
_COMMAND_WIDTH = 48
_OWN_PACE = {JobState.RUNNING, JobState.SUSPENDING, JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED}
"""In these states, the pace in the progress is the pace of the newest attempt."""
_SILENT = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETE}
"""The states for which a list does not show the reason."""
_MOST_REASON = 60
_MOST_STARTS = 5
"""The number of starts that `safepoint status --verbose` shows. A start has a line for each node."""


def row(job: Summary, progress: Progress | None) -> list[str]:
    """The job as a row of a table with the columns of `HEAD`."""
    step = "-" if progress is None else str(progress.step)
    if progress is not None and progress.max_steps:
        step += f"/{progress.max_steps}"
    percent = progress.percent if progress is not None else None
    left_s = progress.remaining_s if progress is not None and job.state is JobState.RUNNING else None
    loss = progress.loss if progress is not None else None
    safe = safe_step(job, progress)
    return [
        job.name,
        str(job.state),
        format_age(clock.wall_s() - clock.parse_utc(job.created)),
        step,
        "-" if percent is None else f"{percent:.0f} %",
        "-" if left_s is None else format_duration(left_s),
        "-" if loss is None else f"{loss:.4g}",
        "-" if safe is None else str(safe),
        _short(job.command or "(not submitted by Safepoint)", _COMMAND_WIDTH),
    ]


def with_reasons(head: Sequence[str], rows: Sequence[Sequence[str]], jobs: Sequence[Summary]) -> list[str]:
    """The table as lines, with the additional column WHY if a job has a reason for its state."""
    reasons = ["" if job.state in _SILENT else _short(job.message, _MOST_REASON) for job in jobs]
    if not any(reasons):
        return table(head, rows)
    return table((*head, "WHY"), [[*row, reason] for row, reason in zip(rows, reasons, strict=True)])


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def page(
    job: Job,
    progress: Progress | None,
    attempts: list[AttemptRecord],
    output: str | None,
    *,
    starts: Sequence[str] = (),
    details: Mapping[str, Any] | None = None,
    options: str = "",
) -> list[str]:
    """Everything about one job, for a person.

    Args:
        job: the job.
        progress: its progress, or None before the first report.
        attempts: its attempts, oldest first.
        output: its output location, or None if it is unknown.
        starts: lines about its last starts; see `timed_starts`.
        details: facts that only this page shows; see `HasDetails`.
        options: appended to the commands that the page suggests.
    """
    size = plural(job.num_nodes, "node")
    if job.ranks_per_node is not None:
        size += f", {plural(job.ranks_per_node, 'rank')} on each"
    lines = [f"{job.name}: {job.state}" + (f" ({job.message})" if job.message else "")]
    lines += [f"  runs        {job.command}"] if job.command else []
    lines += [f"  in          {job.where}", f"  size        {size}"]
    lines += [f"  {key:<11} {text}" for key in ("priority", "queue") if (text := job.particulars.get(key))]
    known = details or {}
    if known.get("queue_place") is not None:
        lines.append(f"  position    number {known['queue_place']} of the jobs that wait in the queue")
    if of_pods := known.get("memory", {}).get("pods"):
        lines.append(f"  memory      {format_bytes(max(of_pods.values()))}, of the pod that uses most")
    if warning := job.particulars.get("warning"):
        lines.append(f"  warning     {warning}")
    if output is not None:
        lines.append(f"  output      {output}")
    if image := image_of(job):
        lines.append(f"  image       {image}")
    if progress is not None:
        lines += [f"  {line}" for line in progress_lines(progress, job.state)]
    if job.exit_code is not None and not job.state.holds_slots:
        lines.append(f"  exit code   {job.exit_code}")
    if attempts:
        lines.append("  attempts")
        lines += [f"    {_attempt(attempt)}" for attempt in attempts]
    if known.get("last_lines"):
        lines.append("  last lines of the output")
        lines += [f"    {line}" for line in known["last_lines"]]
    if starts:
        lines.append("  starts of the ranks, with the seconds after which each phase was over")
        lines += [f"    {start}" for start in starts]
    return [*map(printable, lines), "", *(f"  {command}{options}" for command in useful_commands(job))]


def progress_lines(progress: Progress, state: JobState) -> list[str]:
    """The progress of the training in a few lines. A pace of an earlier attempt is left out."""
    of = f" of {progress.max_steps}" if progress.max_steps else ""
    percent = "" if progress.percent is None else f", {progress.percent:.1f} %"
    left_s = progress.remaining_s if state is JobState.RUNNING else None
    left = f", {format_duration(left_s)} left" if left_s else ""
    lines = [f"step        {progress.step}{of}, epoch {progress.epoch:.2f}{percent}{left}"]
    if progress.loss is not None:
        lines.append(f"loss        {progress.loss:.5g}")
    if progress.steps_per_s is not None and state in _OWN_PACE:
        samples = "" if progress.samples_per_s is None else f", {progress.samples_per_s:.1f} samples/s"
        lines.append(f"pace        {progress.steps_per_s:.2f} steps/s{samples}")
    lines.append(f"safe        {newest_save(progress)}")
    saves = progress.saves
    if saves.count:
        stall = "" if saves.mean_stall_s is None else f", training paused {format_duration(saves.mean_stall_s)} each"
        durable = "" if saves.last_durable_s is None else f", durable after {format_duration(saves.last_durable_s)}"
        lines.append(f"saves       {saves.count}{stall}{durable}")
    if not progress.state.is_end:
        lines += [f"space       {_space(one)}" for one in progress.space if one.is_low]
    return lines


def _space(found: SpaceRecord) -> str:
    """The forecast for a folder that is nearly full, for a person."""
    about = "" if found.remaining_s is None else f", about {format_duration(found.remaining_s)}"
    full = "is nearly full" if found.saves_left is None else f"is full in {plural(found.saves_left, 'save')}"
    if found.saves_left == 0:
        full, about = "has no room for the next save", ""
    free = f" ({format_bytes(found.free_bytes)} free, a save needs {format_bytes(found.needed_bytes)})"
    return f"the {found.place} {full}{about}{free if found.path else ''}"


def timed_starts(events: Sequence[JobEvent]) -> list[str]:
    """Lines about the last starts of a job's ranks, at most `_MOST_STARTS` starts: for each start, a line for each
    node.

    A line has the time of the start and, for each phase, the seconds after which the phase was over.
    """
    lines: list[str] = []
    begins: list[int] = []
    nodes: set[str] = set()
    last: object = None
    for event in events:
        if event.name == "start_timed":
            restart, node, phases = (event.detail.get(name) for name in ("restart", "node", "phases"))
            listed = cast("list[Any]", phases) if isinstance(phases, list) else []
            known = [cast("dict[str, Any]", one) for one in listed if isinstance(one, dict)]
            ends = [f"{one.get('phase')} {one.get('at_s')}" for one in known]
            what = f"restart {restart}" if restart else "first start"
            # A node reports each start once. So another number, or a node that has reported, begins another start.
            if not begins or restart != last or str(node) in nodes:
                begins.append(len(lines))
                nodes.clear()
            nodes.add(str(node))
            last = restart
            lines.append(f"{event.time}  {what}, node {node}: {', '.join(ends)}")
    return lines[begins[-_MOST_STARTS] :] if len(begins) > _MOST_STARTS else lines


def useful_commands(job: Job) -> list[str]:
    """The commands that a user may want next. They depend on the state of the job."""
    if job.state.is_active:
        return [f"safepoint logs -f {job.name}", f"safepoint suspend {job.name}"]
    resume = [f"safepoint resume {job.name}"] if job.can_resume else []
    return [*resume, f"safepoint logs {job.name}", f"safepoint delete {job.name}"]


def _attempt(attempt: AttemptRecord) -> str:
    nodes = plural(attempt.num_nodes, "node")
    if attempt.ended is None:
        return f"{attempt.number}  {attempt.started}, {nodes}, running"
    lasted = format_duration(clock.parse_utc(attempt.ended) - clock.parse_utc(attempt.started))
    return f"{attempt.number}  {attempt.started}, {nodes}, {lasted}: {attempt.outcome}"
