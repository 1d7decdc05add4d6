"""What the page of a job shows."""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from safepoint.answers.consequence import Action, actions_of
from safepoint.answers.details import details_of
from safepoint.answers.process_images import image_of
from safepoint.answers.situation import sentence_of
from safepoint.dashboard.reading.places import ListedJob, PlaceReader
from safepoint.errors import printable
from safepoint.foundation.processes import memory_of
from safepoint.jobs.cluster.pods.pod_summary import PodSummary
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.job_place import HasDetails, Job, JobPlace
from safepoint.jobs.model.job_progress import risk_of_suspending
from safepoint.jobs.model.records import AttemptRecord, JobEvent, JobRecord
from safepoint.presentation.drawings import Curve, Timeline, curve_of, metric_names, num_metrics, timeline_of
from safepoint.progress.metric_history import MetricPoint
from safepoint.progress.record import Progress
from safepoint.settings.run_settings import RunSettings

MOST_RANKS = 64
"""The limit of ranks that a page shows."""
_LAUNCHERS_OWN = {"record_folder", "launcher_pid", "keeper", "job_dir", "has_begun", "first_start", "wording"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """A training process of the newest attempt.

    Args:
        rank: its number.
        host: its machine or pod.
        pid: the number of its process there; None if it is not known.
        memory_bytes: its memory; None if it does not run, if it is on another machine, or if the page does not show
            this rank.
    """

    rank: int
    host: str
    pid: int | None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job with everything that its page shows.

    Args:
        listed: the job.
        progress: its last report; None if there is none. If the pods of a cluster cannot report, it is read from the
            output of the job.
        details: what only `status` and this page show, such as the last lines of a failed job; see `details_of`.
        output: its output location; None if it is unknown.
        image: its newest process image; None if no image is known.
        attempts: oldest first.
        events: oldest first.
        sentence: what it is doing, and why.
        risk: a warning if a save may not fit into the grace period; None if a save fits, or if this is not known.
        timeline: its attempts over time; None before the first attempt.
        curves: the curves of its metrics, the most important ones first.
        num_metrics: how many metrics it has, also those without a curve.
        ranks: the ranks that the newest attempt has reported.
        pods: for a job on a cluster, the pods that train.
        actions: the actions that it accepts now.
        settings: the options of its run that differ from the defaults: name → the value, and where the option was set
            (empty if this is not known).
        commands: commands for this job, each with what it does.
    """

    listed: ListedJob
    progress: Progress | None
    details: Mapping[str, Any]
    output: str | None
    image: str | None
    attempts: tuple[AttemptRecord, ...]
    events: tuple[JobEvent, ...]
    sentence: str
    risk: str | None
    timeline: Timeline | None
    curves: tuple[Curve, ...]
    num_metrics: int
    ranks: tuple[RankFacts, ...]
    pods: tuple[PodSummary, ...]
    actions: tuple[Action, ...]
    settings: Mapping[str, tuple[str, str]]
    commands: tuple[tuple[str, str], ...]


def read_job(reader: PlaceReader, name: str) -> JobView:
    """Read a job.

    Raises:
        NotFoundError: there is no such job.
        SafepointError: its place cannot be read.
    """
    listed = reader.job(name)
    job = listed.job

    def ask(jobs: JobPlace[Any]) -> tuple[str | None, list[AttemptRecord], dict[str, Any], Progress | None]:
        progress = listed.progress
        if progress is None and isinstance(jobs, HasDetails):
            progress = jobs.progress_in_log(job)
        return jobs.output_of(job), jobs.attempts(name), details_of(jobs, job), progress

    output, attempts, details, progress = reader.call(ask)
    events = reader.events(listed)
    points = reader.points(listed)
    return JobView(
        listed=listed,
        progress=progress,
        details=details,
        output=output,
        image=image_of(job),
        attempts=tuple(attempts),
        events=tuple(events),
        sentence=sentence_of(
            job, progress, queue_place=details["queue_place"], verified_s=_verified_s(events, progress)
        ),
        risk=risk_of_suspending(job, progress),
        timeline=timeline_of(attempts, events),
        curves=tuple(curve for one in metric_names(points) if (curve := curve_of(one, points)) is not None),
        num_metrics=num_metrics(points),
        ranks=_ranks(job, events),
        pods=job.pods if isinstance(job, ClusterJob) else (),
        actions=tuple(actions_of(job)),
        settings=_settings(job.settings, job.spec.origins if isinstance(job, JobRecord) else {}),
        commands=_commands(reader, name, output),
    )


def metric_columns(points: Sequence[MetricPoint]) -> dict[str, Any]:
    """The metrics of a job as columns of numbers; null where a metric was not reported.

    Each metric has the same name as on the page, because the script of the page compares the names.
    """
    attempts: dict[int, int] = {}
    for point in points:
        attempts.setdefault(point.attempt, point.step)
    return {
        "steps": [point.step for point in points],
        "times": [point.time for point in points],
        "attempts": [{"attempt": number, "first_step": step} for number, step in attempts.items()],
        "metrics": {
            printable(name): [_rounded(point.values.get(name)) for point in points] for name in metric_names(points)
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _verified_s(events: Sequence[JobEvent], progress: Progress | None) -> float | None:
    """How long the newest resume took to verify its checkpoint, in seconds; None if this is not known."""
    if progress is None or progress.resumed_step is None:
        return None
    for event in reversed(events):
        if event.name == "resumed" and event.detail.get("step") == progress.resumed_step:
            seconds = event.detail.get("duration_s")
            return seconds if type(seconds) is float and 0 <= seconds < math.inf else None
    return None


def _ranks(job: Job, events: Sequence[JobEvent]) -> tuple[RankFacts, ...]:
    for event in reversed(events):
        ranks = event.detail.get("ranks")
        if event.name == "attempt_started" and isinstance(ranks, list):
            found = [fact for one in cast("list[Any]", ranks) if (fact := _rank(one)) is not None]
            return (*(_with_memory(job, fact) for fact in found[:MOST_RANKS]), *found[MOST_RANKS:])
    return ()


def _with_memory(job: Job, rank: RankFacts) -> RankFacts:
    if not isinstance(job, JobRecord) or not job.state.holds_slots or rank.pid is None:
        return rank
    return dataclasses.replace(rank, memory_bytes=memory_of(rank.pid, job_folder(job.name)))


def _rank(record: Any) -> RankFacts | None:
    """The rank in an event; None if the value is not valid. Any program may have written the event."""
    if not isinstance(record, Mapping):
        return None
    facts = cast("Mapping[str, Any]", record)
    rank, pid = facts.get("rank"), facts.get("pid")
    host = str(facts.get("host", ""))
    return RankFacts(rank=rank, host=host, pid=pid if type(pid) is int else None) if type(rank) is int else None


def _settings(settings: RunSettings, origins: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    usual = RunSettings()
    changed = {
        item.name.removesuffix("_s").replace("_", "-"): str(getattr(settings, item.name))
        for item in dataclasses.fields(RunSettings)
        if item.name not in _LAUNCHERS_OWN and getattr(settings, item.name) != getattr(usual, item.name)
    }
    return {name: (text, origins.get(name, "")) for name, text in changed.items()}


def _commands(reader: PlaceReader, name: str, output: str | None) -> tuple[tuple[str, str], ...]:
    on = reader.option
    found = [
        ("this page", f"safepoint status{on} {name}"),
        ("its output, as it is printed", f"safepoint logs -f{on} {name}"),
        ("its events", f"safepoint events{on} {name}"),
        ("save and stop it", f"safepoint suspend{on} {name}"),
        ("continue it", f"safepoint resume{on} {name}"),
        ("give it two nodes", f"safepoint scale{on} --nnodes 2 {name}"),
        ("remove it; its checkpoints stay", f"safepoint delete{on} {name}"),
    ]
    if output is not None:
        found.append(("its checkpoints", f"safepoint checkpoints list{on} {shlex.quote(output)}"))
    return tuple(found)
