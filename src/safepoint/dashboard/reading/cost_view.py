"""For each job, the hours in which it held its slots, did work again, and waited; and what these hours cost."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from safepoint.answers.costs import cost_document, held_s, history_of, waited_s
from safepoint.dashboard.reading.places import ListedJob, PlaceReader, Places
from safepoint.errors import NotFoundError, SafepointError
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.model.records import AttemptRecord
from safepoint.planning.costs import HOUR_S, JobHistory
from safepoint.progress.record import Progress

MOST_JOBS = 200
"""The limit of jobs that are counted for each place. The newest jobs are counted."""
_MOST_LOST_S = 1e12
_INTERVAL_S = 3600.0
"""The policy that Safepoint is compared with: a save in each hour, and none on SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """What a job has cost. Times are in seconds of all its slots together, except for `waited_s`.

    Args:
        listed: the job.
        unit: the kind of its slots: `GPU`, `CPU`, or `rank` for a job on a cluster whose devices are not known.
        num_slots: the number of its slots.
        held_s: how long it has held its slots.
        lost_s: the time of work that had to be done again; None if it is not known.
        down_s: the time from interruptions until it trained again, while it held its slots; None if it is not known.
        saved_s: how much more time the same interruptions would have cost if the job saved once per hour, and not on
            SIGTERM; None if it is not known.
        waited_s: how long it waited for its machines.
        num_interruptions: how often it was interrupted; None if it is not known.
        price: the price of one slot for an hour; 0 if it is not known.
        document: the JSON document of `safepoint plan cost --for`, with the price of all slots of the job.
    """

    listed: ListedJob
    unit: str
    num_slots: int
    held_s: float
    lost_s: float | None
    down_s: float | None
    saved_s: float | None
    waited_s: float
    num_interruptions: int | None
    price: float
    document: dict[str, Any]


def read_costs(places: Places, *, price_of: Callable[[str], float]) -> tuple[list[JobCost], int]:
    """The costs of the newest jobs, the largest `held_s` first; and how many older jobs are left out.

    Args:
        places: where the jobs are.
        price_of: kind of slot → the price of one slot for an hour; 0 if it is not known.
    """
    found: list[JobCost] = []
    num_older = 0
    for reader in places.readers.values():
        listed = sorted(reader.read().jobs.values(), key=lambda one: one.job.created, reverse=True)
        num_older += max(0, len(listed) - MOST_JOBS)
        try:
            for one in listed[:MOST_JOBS]:
                with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
                    found.append(_cost(reader, one, price_of))
        except SafepointError:
            continue  # the list of jobs shows why
    return sorted(found, key=lambda cost: cost.held_s, reverse=True), num_older


def _cost(reader: PlaceReader, one: ListedJob, price_of: Callable[[str], float]) -> JobCost:
    job = one.job
    gpus = job.particulars.get("gpu_per_node") or 0
    cpus = job.particulars.get("cpu_per_node") or 0
    slots = gpus or cpus or job.ranks_per_node or 1
    num_slots = int(slots) * job.num_nodes
    attempts, history = _read(reader, one)
    unit = "GPU" if gpus else "CPU" if cpus else "rank"
    price = price_of(unit)
    document = cost_document(job.name, history, price=price * num_slots, interval_s=_INTERVAL_S)
    common = JobCost(
        listed=one,
        unit=unit,
        num_slots=num_slots,
        held_s=held_s(attempts, num_slots=int(slots)),
        lost_s=history.lost_s * num_slots,
        down_s=history.down_s * num_slots,
        saved_s=(history.lost_with_interval_s(_INTERVAL_S) - history.lost_s) * num_slots,
        waited_s=waited_s(job, attempts, history),
        num_interruptions=len(history.interruptions),
        price=price,
        document=document,
    )
    return _as_posted(common, one.progress) if isinstance(job, ClusterJob) else common


def _as_posted(cost: JobCost, progress: Progress | None) -> JobCost:
    """The cost of a job on a cluster. The cluster does not record when a job was interrupted.

    The pods post the number of the attempt, and how many steps they have repeated. Each start of the ranks increases
    the number of the attempt.
    """
    steps = None if progress is None else progress.repeated_steps
    lost_s = 0.0 if steps == 0 else None if progress is None or steps is None else progress.time_of(steps)
    if lost_s is not None and lost_s >= _MOST_LOST_S:  # a pod may post any number
        lost_s = None
    num_starts = 0 if progress is None else progress.attempt
    document = {
        **cost.document,
        "num_interruptions": num_starts - 1 if num_starts else None,
        "seconds": {**dict.fromkeys(cost.document["seconds"]), "lost": lost_s},
        "money": {
            **dict.fromkeys(cost.document["money"]),
            "lost": None if lost_s is None else lost_s / HOUR_S * cost.price * cost.num_slots,
        },
    }
    return replace(
        cost,
        lost_s=None if lost_s is None else lost_s * cost.num_slots,
        down_s=None,
        saved_s=None,
        num_interruptions=document["num_interruptions"],
        document=document,
    )


def _read(reader: PlaceReader, one: ListedJob) -> tuple[list[AttemptRecord], JobHistory]:
    """The attempts and interruptions of a job. They are read again only if the job has changed.

    The events of a cluster do not state when a job was interrupted, so they are not requested; see `_as_posted`.
    """
    if isinstance(one.job, ClusterJob):
        return [*one.job.attempts], history_of(())
    mark = (one.job, one.mark)
    before = reader.histories.get(one.job.name)
    if before is None or before[0] != mark:
        read = reader.call(lambda jobs: (jobs.attempts(one.job.name), history_of(jobs.events(one.job.name))))
        reader.histories[one.job.name] = before = (mark, read)
    return before[1]


def hours(seconds: float) -> float:
    """Seconds in hours."""
    return seconds / HOUR_S
