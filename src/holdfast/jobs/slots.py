"""Which job may start, and whom it may ask to leave. Pure: decided from what the history says and what there is.

A job takes slots for `cpu` and `gpu`. Jobs wait in order of priority, then of age. One that fits starts, unless a
job before it fits too, or needs these slots beside those that others are leaving for it: jobs that were preempted for
a large one would come back in turn otherwise, and it would never start. A job that does not fit may take the slots of
jobs of lower priority: the lowest first, of those the youngest first, and no more of them than it takes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state import JobState, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """So many of each.

    Args:
        cpu: processor cores, as a unit of account: nothing is pinned.
        gpu: devices.
    """

    cpu: int
    gpu: int

    def __add__(self, other: "Slots") -> "Slots":
        return Slots(cpu=self.cpu + other.cpu, gpu=self.gpu + other.gpu)

    def __sub__(self, other: "Slots") -> "Slots":
        return Slots(cpu=self.cpu - other.cpu, gpu=self.gpu - other.gpu)

    def holds(self, other: "Slots") -> bool:
        """Whether `other` fits in."""
        return other.cpu <= self.cpu and other.gpu <= self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a waiting job may do.

    Args:
        may_start: the slots are free.
        preempt: the jobs to ask for theirs.
        waits_for: why it waits, for people.
    """

    may_start: bool = False
    preempt: tuple[str, ...] = ()
    waits_for: str = ""


def count_slots(environ: Mapping[str, str] | None = None) -> Slots:
    """What this machine has: HOLDFAST_CPU_SLOTS and HOLDFAST_GPU_SLOTS, or its cores and the NVIDIA devices in /dev.

    Raises:
        UsageError: a variable is no number.
    """
    environ = os.environ if environ is None else environ
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    counts = {"HOLDFAST_CPU_SLOTS": os.cpu_count() or 1, "HOLDFAST_GPU_SLOTS": gpus}
    for name in counts:
        text = environ.get(name, "").strip()
        if text and not text.isdecimal():
            raise UsageError(f"{name}={text!r} must be a whole number")
        if text:
            counts[name] = int(text)
    return Slots(cpu=counts["HOLDFAST_CPU_SLOTS"], gpu=counts["HOLDFAST_GPU_SLOTS"])


def needs(job: JobRecord, capacity: Slots) -> Slots:
    """What a job takes; on a machine that is smaller than its wish, all that there is of cores."""
    return Slots(cpu=min(job.cpu, capacity.cpu), gpu=job.gpu)


def admit(name: str, jobs: Sequence[JobRecord], capacity: Slots) -> Admission:
    """Whether the waiting job `name` may start now.

    Args:
        name: the job that asks.
        jobs: all jobs that hold slots or wait for some, itself among them.
        capacity: what the machine has.
    """
    asking = next(job for job in jobs if job.name == name)
    need = needs(asking, capacity)
    holding = [job for job in jobs if job.state.holds_slots and job.name != name]
    free = capacity - _sum(holding, capacity)
    room = free + _sum([job for job in holding if job.wanted is not Wanted.RUN], capacity)
    waiting = [job for job in jobs if job.state.is_waiting and job.wanted is Wanted.RUN]
    for job in sorted((job for job in waiting if _order(job) < _order(asking)), key=_order):
        wish = needs(job, capacity)
        if free.holds(wish):
            return Admission(waits_for=f"job {job.name} goes first")
        if room.holds(wish):
            room -= wish  # it takes what others are leaving
        elif (room + _sum(_weaker(job, holding), capacity)).holds(wish):
            return Admission(waits_for=f"job {job.name} goes first: others make room for it")
    if free.holds(need) and room.holds(need):
        return Admission(may_start=True)
    return _ask_others(asking, need, room, holding, capacity)


def _ask_others(
    asking: JobRecord, need: Slots, room: Slots, holding: Sequence[JobRecord], capacity: Slots
) -> Admission:
    if room.holds(need):
        return Admission(waits_for="a job that is about to stop")
    chosen: list[JobRecord] = []
    weaker = _weaker(asking, holding)
    for job in sorted(weaker, key=lambda job: (-job.spec.priority, job.created, job.name), reverse=True):
        if room.holds(need):
            break
        room += needs(job, capacity)
        chosen.append(job)
    if not room.holds(need):
        return Admission(waits_for=_describe(need, capacity))
    for job in list(chosen):  # one that was taken early may not be needed for those that were taken later
        if (room - needs(job, capacity)).holds(need):
            room -= needs(job, capacity)
            chosen.remove(job)
    return Admission(preempt=tuple(job.name for job in chosen), waits_for="jobs of lower priority that are to stop")


def _weaker(asking: JobRecord, holding: Sequence[JobRecord]) -> list[JobRecord]:
    """Those that it may ask to be preempted."""
    return [job for job in holding if job.wanted is Wanted.RUN and job.spec.priority < asking.spec.priority]


def _sum(jobs: Sequence[JobRecord], capacity: Slots) -> Slots:
    return sum((needs(job, capacity) for job in jobs), Slots(cpu=0, gpu=0))


def _order(job: JobRecord) -> tuple[int, str, str]:
    return (-job.spec.priority, job.created, job.name)


def _describe(need: Slots, capacity: Slots) -> str:
    gpu = f" and {need.gpu} gpu" if need.gpu else ""
    return f"{need.cpu} cpu{gpu} of {capacity.cpu} cpu and {capacity.gpu} gpu to be free"


def free_gpus(taken: Sequence[int], wanted: int, capacity: Slots) -> tuple[int, ...]:
    """The numbers of `wanted` devices that nobody has taken."""
    free = [number for number in range(capacity.gpu) if number not in set(taken)]
    return tuple(free[:wanted])


HOLDING = tuple(state for state in JobState if state.holds_slots)
CONCERNED = tuple(state for state in JobState if state.holds_slots or state.is_waiting)

__all__ = ["CONCERNED", "HOLDING", "Admission", "Slots", "admit", "count_slots", "free_gpus", "needs"]
