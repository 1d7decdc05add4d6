"""Which job may start, and whom it may ask to leave. Pure: decided from what the history says and what there is.

A job takes slots for `cpu` and `gpu`. Jobs wait in order of priority, then of age. One that fits starts, unless a
job before it fits too, or needs these slots beside those that others are leaving for it: jobs that were preempted for
a large one would come back in turn otherwise, and it would never start. A job that does not fit may take the slots of
jobs of lower priority: the lowest first, of those the youngest first, and no more of them than it takes.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.state import JobState, Wanted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RANKS_PER_CORE = 4
"""A job of four ranks can be tried on a laptop's core; more of them only keep each other from their work."""
_MOST_RANKS = 512
"""Of one job on one machine, whatever it says it has."""


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
    """What this machine has, the same for whoever counts.

    SAFEPOINT_CPU_SLOTS and SAFEPOINT_GPU_SLOTS, else `[local]` of the user's settings, else its cores and devices.

    Raises:
        UsageError: a variable is no number, or the settings cannot be read.
    """
    environ = os.environ if environ is None else environ
    cpu = _said("SAFEPOINT_CPU_SLOTS", Configuration.of_user(environ).local.cpu_slots, environ)
    return Slots(cpu=(os.cpu_count() or 1) if cpu is None else cpu, gpu=len(devices(environ)))


def devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs that jobs may have, as CUDA_VISIBLE_DEVICES names them: those that it says, else the first ones.

    Raises:
        UsageError: as for `count_slots`.
    """
    environ = os.environ if environ is None else environ
    count = _said("SAFEPOINT_GPU_SLOTS", Configuration.of_user(environ).local.gpu_slots, environ)
    mask = environ.get(VISIBLE)
    if mask is None or JOB_VARIABLE in environ:  # within a job, that is what the job was given
        return tuple(map(str, range(_num_devices() if count is None else count)))
    own = itertools.takewhile(lambda name: name not in {"", "-1"}, (name.strip() for name in mask.split(",")))
    return tuple(own)[:count]


def has_devices() -> bool:
    """Whether there is a GPU that a job could see, whoever it is for."""
    return _num_devices() > 0 or bool(devices())


def _num_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _said(variable: str, setting: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{variable}={text!r} must be a whole number")
    return int(text) if text else setting


def check_size(spec: JobSpec, capacity: Slots) -> None:
    """See that a job does not ask for more than this machine could ever do.

    Raises:
        UsageError: it does.
    """
    gpu = spec.num_nodes * spec.gpu_per_node
    if gpu > capacity.gpu:
        raise UsageError(
            f"the job takes {gpu} gpu, and this machine has {capacity.gpu}", hint="ask for fewer, or for none"
        )
    # Processes are what a machine has too many of; cores, as for a cluster's node, are shared and only counted.
    ranks = spec.num_nodes * spec.ranks_per_node
    most = min(_MOST_RANKS, _RANKS_PER_CORE * max(1, capacity.cpu))
    if ranks > most:
        raise UsageError(
            f"the job has {ranks} ranks on {spec.num_nodes} nodes, and {most} can run at most on this machine with "
            f"{capacity.cpu} cores; nothing was done",
            hint="ask for fewer; SAFEPOINT_CPU_SLOTS says how many cores it has, where they were counted wrongly",
        )


def remark_on(spec: JobSpec, capacity: Slots) -> str:
    """What is to be said of a job that is larger than the machine and runs all the same; empty for others."""
    cpu = spec.num_nodes * spec.cpu_per_node
    if cpu <= capacity.cpu:
        return ""
    return f"the job takes {cpu} cpu, and this machine has {capacity.cpu}: its ranks share them"


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


def free_gpus(taken: Sequence[str], wanted: int, pool: Sequence[str]) -> tuple[str, ...]:
    """`wanted` devices of the pool that nobody has taken, the first ones first."""
    free = [device for device in pool if device not in set(taken)]
    return tuple(free[:wanted])


HOLDING = tuple(state for state in JobState if state.holds_slots)
CONCERNED = tuple(state for state in JobState if state.holds_slots or state.is_waiting)
