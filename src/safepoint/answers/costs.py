"""What the interruptions of a job cost in time and money, computed from its events and attempts."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from safepoint.foundation import clock
from safepoint.jobs.model.job_place import Job
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.planning.costs import Happened, JobHistory, read_history

MOST_SHOWN = 10_000
"""How many interruptions an answer lists, the newest ones. A history that someone else has written may have any
number."""


def history_of(events: Iterable[JobEvent]) -> JobHistory:
    """The interruptions of a job. Events without a valid time are left out."""
    read: list[Happened] = []
    for event in events:
        step, saved = event.detail.get("step"), event.detail.get("saved")
        with contextlib.suppress(ValueError):
            read.append(
                Happened(
                    time_s=clock.parse_utc(event.time),
                    name=event.name,
                    step=step if isinstance(step, int) else None,
                    saved=saved if isinstance(saved, bool) else None,
                )
            )
    return read_history(read)


def cost_document(name: str, history: JobHistory, *, price: float, interval_s: float) -> dict[str, Any]:
    """The costs of a job as JSON. Sums count all interruptions; at most `MOST_SHOWN` interruptions are listed.

    Args:
        name: the name of the job.
        history: the interruptions of the job.
        price: the price of all machines of the job together, for an hour.
        interval_s: the job is compared with a job that saves at this interval, in seconds, and not on SIGTERM.
    """
    without_s, with_interval_s = history.lost_without_saves_s(), history.lost_with_interval_s(interval_s)
    seconds = {
        "lost": history.lost_s,
        "down": history.down_s,
        "without_checkpoints": without_s,
        "saved": without_s - history.lost_s,
        "with_interval": with_interval_s,
        "saved_against_interval": with_interval_s - history.lost_s,
    }
    return {
        "job": name,
        "trained_s": history.trained_s,
        "interval_s": interval_s,
        "seconds": seconds,
        "money": {kind: value * price / 3600 for kind, value in seconds.items()},
        "interruptions": [
            {
                "time": clock.as_utc(past.time_s),
                "cause": str(past.cause),
                "trained_s": past.trained_s,
                "lost_s": past.lost_s,
                "down_s": past.down_s,
                "waiting_s": past.waiting_s,
            }
            for past in history.interruptions[-MOST_SHOWN:]
        ],
    }


def held_s(attempts: Sequence[AttemptRecord], *, num_slots: int) -> float:
    """How many seconds a job has held slots, summed over its slots.

    Args:
        attempts: the attempts of the job. An attempt that has not ended counts until now.
        num_slots: how many slots the job holds on each node.
    """
    total_s = 0.0
    for attempt in attempts:
        with contextlib.suppress(ValueError):
            ended_s = clock.wall_s() if attempt.ended is None else clock.parse_utc(attempt.ended)
            total_s += max(0.0, ended_s - clock.parse_utc(attempt.started)) * attempt.num_nodes * num_slots
    return total_s


def waited_s(job: Job, attempts: Sequence[AttemptRecord], history: JobHistory) -> float:
    """How many seconds a job has waited for its machines: before its first attempt, and after preemptions.

    If a job on a cluster has stopped, its attempts may be unknown. The wait before its first attempt is then
    left out.
    """
    before_s = 0.0
    with contextlib.suppress(ValueError):
        if attempts:
            before_s = max(0.0, clock.parse_utc(attempts[0].started) - clock.parse_utc(job.created))
        elif job.state.is_active:
            before_s = max(0.0, clock.wall_s() - clock.parse_utc(job.created))
    return before_s + sum(past.waiting_s for past in history.interruptions)
