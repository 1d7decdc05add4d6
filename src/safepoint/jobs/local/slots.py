"""Decides which job may start, and which jobs it preempts. Pure: from the jobs in the history and the slots.

A job takes slots for `cpu` and `gpu`. Jobs wait in order of priority, then of age. A job that fits starts, unless a
job before it fits too, or needs these slots together with those that other jobs are about to free: otherwise the jobs
that were preempted for a large one would restart in turn, and the large one never. A job that does not fit preempts
jobs of lower priority: the lowest first, of those the youngest first, and no more than it needs.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.jobs.model.records import JobRecord, JobState, RequestedAction
from safepoint.jobs.model.spec import JobSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RANKS_PER_CORE = 4
"""A job of four ranks can be tried on one core of a laptop; more would only slow each other down."""
_MOST_RANKS = 512
"""Limit for one job on one machine, whatever its number of slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Numbers of slots.

    Args:
        cpu: processor cores; ranks are not pinned to them.
        gpu: devices.
    """

    cpu: int
    gpu: int

    def __add__(self, other: "Slots") -> "Slots":
        return Slots(cpu=self.cpu + other.cpu, gpu=self.gpu + other.gpu)

    def __sub__(self, other: "Slots") -> "Slots":
        return Slots(cpu=self.cpu - other.cpu, gpu=self.gpu - other.gpu)

    def holds(self, other: "Slots") -> bool:
        """Whether `other` fits into these."""
        return other.cpu <= self.cpu and other.gpu <= self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a waiting job may do.

    Args:
        may_start: its slots are free.
        preempt: the jobs to preempt.
        waits_for: why it waits.
    """

    may_start: bool = False
    preempt: tuple[str, ...] = ()
    waits_for: str = ""


def count_slots(environ: Mapping[str, str] | None = None) -> Slots:
    """The slots of this machine.

    SAFEPOINT_CPU_SLOTS and SAFEPOINT_GPU_SLOTS, else `[local]` of the user's settings, else its cores and devices.

    Raises:
        UsageError: a variable is no number, or the settings cannot be read.
    """
    environ = os.environ if environ is None else environ
    cpu = _number("SAFEPOINT_CPU_SLOTS", Configuration.of_user(environ).local.cpu_slots, environ)
    return Slots(cpu=(os.cpu_count() or 1) if cpu is None else cpu, gpu=len(devices(environ)))


def devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs for jobs, by their names in CUDA_VISIBLE_DEVICES: those that it lists, else the first ones.

    Raises:
        UsageError: as for `count_slots`.
    """
    environ = os.environ if environ is None else environ
    count = _number("SAFEPOINT_GPU_SLOTS", Configuration.of_user(environ).local.gpu_slots, environ)
    mask = environ.get(VISIBLE)
    if mask is None or JOB_VARIABLE in environ:  # within a job, it has the devices of that job
        return tuple(map(str, range(_num_devices() if count is None else count)))
    own = itertools.takewhile(lambda name: name not in {"", "-1"}, (name.strip() for name in mask.split(",")))
    return tuple(own)[:count]


def has_devices() -> bool:
    """Whether this machine has a GPU that a job could see."""
    return _num_devices() > 0 or bool(devices())


def _num_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _number(variable: str, setting: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise UsageError(f"{variable}={text!r} must be a whole number")
    return int(text) if text else setting


def check_size(spec: JobSpec, capacity: Slots) -> None:
    """Check that a job fits this machine when no other job runs.

    Raises:
        UsageError: it does not.
    """
    gpu = spec.num_nodes * spec.gpu_per_node
    if gpu > capacity.gpu:
        raise UsageError(
            f"the job needs {gpu} gpu, and this machine has {capacity.gpu}; nothing was done", hint="request fewer"
        )
    # Cores are shared by ranks, so that only the number of processes is limited.
    ranks = spec.num_nodes * spec.ranks_per_node
    most = min(_MOST_RANKS, _RANKS_PER_CORE * max(1, capacity.cpu))
    if ranks > most:
        raise UsageError(
            f"the job has {ranks} ranks on {spec.num_nodes} nodes, and at most {most} can run on this machine with "
            f"{capacity.cpu} cores; nothing was done",
            hint="request fewer; if the number of cores is wrong, set SAFEPOINT_CPU_SLOTS",
        )


def remark_on(spec: JobSpec, capacity: Slots) -> str:
    """A warning for a job that needs more cores than the machine has, and runs nevertheless; empty for others."""
    cpu = spec.num_nodes * spec.cpu_per_node
    if cpu <= capacity.cpu:
        return ""
    return f"the job needs {cpu} cpu, and this machine has {capacity.cpu}: its ranks share them"


def needs(job: JobRecord, capacity: Slots) -> Slots:
    """The slots that a job takes: at most all the cores of the machine."""
    spec = job.spec
    return Slots(cpu=min(spec.num_nodes * spec.cpu_per_node, capacity.cpu), gpu=spec.num_nodes * spec.gpu_per_node)


def admit(name: str, jobs: Sequence[JobRecord], capacity: Slots) -> Admission:
    """Whether the waiting job `name` may start now.

    Args:
        name: the waiting job.
        jobs: all jobs that hold slots or wait for some, including this one.
        capacity: the slots of the machine.
    """
    asking = next(job for job in jobs if job.name == name)
    need = needs(asking, capacity)
    holding = [job for job in jobs if job.state.holds_slots and job.name != name]
    free = capacity - _sum(holding, capacity)
    room = free + _sum([job for job in holding if job.wanted is not RequestedAction.RUN], capacity)
    waiting = [job for job in jobs if job.state.is_waiting and job.wanted is RequestedAction.RUN]
    for job in sorted((job for job in waiting if _order(job) < _order(asking)), key=_order):
        need_before = needs(job, capacity)
        if free.holds(need_before):
            return Admission(waits_for=f"job {job.name}, which starts first")
        if room.holds(need_before):
            room -= need_before  # it takes the slots that others are about to free
        elif (room + _sum(_preemptible(job, holding), capacity)).holds(need_before):
            return Admission(waits_for=f"job {job.name}, which starts first, when other jobs have stopped for it")
    if free.holds(need) and room.holds(need):
        return Admission(may_start=True)
    return _preempt(asking, need, room, holding, capacity)


def _preempt(asking: JobRecord, need: Slots, room: Slots, holding: Sequence[JobRecord], capacity: Slots) -> Admission:
    if room.holds(need):
        return Admission(waits_for="a job that is about to stop")
    chosen: list[JobRecord] = []
    candidates = _preemptible(asking, holding)
    for job in sorted(candidates, key=lambda job: (-job.spec.priority, job.created, job.name), reverse=True):
        if room.holds(need):
            break
        room += needs(job, capacity)
        chosen.append(job)
    if not room.holds(need):
        return Admission(waits_for=_describe(need, capacity))
    for job in list(chosen):  # a job that was chosen early may not be needed after later ones
        if (room - needs(job, capacity)).holds(need):
            room -= needs(job, capacity)
            chosen.remove(job)
    return Admission(preempt=tuple(job.name for job in chosen), waits_for="jobs of lower priority to stop")


def _preemptible(asking: JobRecord, holding: Sequence[JobRecord]) -> list[JobRecord]:
    """The jobs that it may preempt."""
    return [job for job in holding if job.wanted is RequestedAction.RUN and job.spec.priority < asking.spec.priority]


def _sum(jobs: Sequence[JobRecord], capacity: Slots) -> Slots:
    return sum((needs(job, capacity) for job in jobs), Slots(cpu=0, gpu=0))


def _order(job: JobRecord) -> tuple[int, str, str]:
    return (-job.spec.priority, job.created, job.name)


def _describe(need: Slots, capacity: Slots) -> str:
    gpu = f" and {need.gpu} gpu" if need.gpu else ""
    return f"{need.cpu} cpu{gpu} of {capacity.cpu} cpu and {capacity.gpu} gpu to be free"


def free_gpus(taken: Sequence[str], count: int, pool: Sequence[str]) -> tuple[str, ...]:
    """The first `count` devices of the pool that are not taken."""
    free = [device for device in pool if device not in set(taken)]
    return tuple(free[:count])


HOLDING = tuple(state for state in JobState if state.holds_slots)
CONCERNED = tuple(state for state in JobState if state.holds_slots or state.is_waiting)
