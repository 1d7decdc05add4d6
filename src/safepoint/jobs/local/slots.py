"""Decides which job may start, and which jobs it preempts, from the jobs in the history and the slots of the machine.

A slot is a CPU core or a GPU. A preempted job is saved and stopped in favour of a job with a higher priority.

A job takes CPU and GPU slots. Jobs wait in order of priority, then of age. A job may start when its slots are free,
and no earlier job goes first. An earlier job goes first if it can start now, or could start after other jobs have
been preempted for it. Slots that other jobs are about to free are kept for an earlier job that needs them. Without
this rule, the jobs that were preempted for a large job would restart, and the large job would never start.

A job that does not fit preempts jobs of lower priority, but only as many as necessary. Jobs of the lowest priority
are preempted first. Among jobs of the same priority, the youngest are preempted first.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.foundation.configuration import Configuration
from safepoint.foundation.processes import JOB_VARIABLE
from safepoint.foundation.quantities import parse_whole
from safepoint.foundation.units import plural
from safepoint.jobs.model.records import JobRecord, RequestedAction
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RANKS_PER_CORE = 4
"""Four ranks on one core are enough to try a job on a laptop; more ranks would only slow each other down."""
_MOST_RANKS = 512
"""The most ranks that one job may have, however many slots the machine has."""


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
        """Whether `other` fits into these slots."""
        return other.cpu <= self.cpu and other.gpu <= self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether a waiting job may start.

    Args:
        may_start: whether the slots that the job needs are free, and no earlier job goes first.
        preempt: the jobs to preempt for this job.
        waits_for: what this job waits for, in words.
    """

    may_start: bool = False
    preempt: tuple[str, ...] = ()
    waits_for: str = ""


def count_slots(environ: Mapping[str, str] | None = None) -> Slots:
    """The slots of this machine.

    Each number comes from the variable SAFEPOINT_CPU_SLOTS or SAFEPOINT_GPU_SLOTS. If the variable is not set, the
    number comes from the table `[local]` of the user's settings. If there is no such setting, it is the number of
    cores or devices of the machine (see `devices`).

    Raises:
        UsageError: a variable is not a number, or the settings cannot be read.
    """
    environ = os.environ if environ is None else environ
    cpu = _number("SAFEPOINT_CPU_SLOTS", Configuration.of_user(environ).local.cpu_slots, environ)
    return Slots(cpu=(os.cpu_count() or 1) if cpu is None else cpu, gpu=len(devices(environ)))


def devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs for jobs, as CUDA_VISIBLE_DEVICES names them.

    If that variable is set, and this is not a process of a job, the devices are those in the variable. In all other
    cases, they are numbered from 0, up to the number of devices in the machine. If a number of GPU slots is
    configured, it sets the number of devices: in the first case as a limit, in the second case exactly.

    Raises:
        UsageError: as for `count_slots`.
    """
    environ = os.environ if environ is None else environ
    count = _number("SAFEPOINT_GPU_SLOTS", Configuration.of_user(environ).local.gpu_slots, environ)
    mask = environ.get(VISIBLE)
    # A process of a job cannot use the variable: it has only that job's devices.
    if mask is None or JOB_VARIABLE in environ:
        return tuple(map(str, range(_num_devices() if count is None else count)))
    own = itertools.takewhile(lambda name: name not in {"", "-1"}, (name.strip() for name in mask.split(",")))
    return tuple(own)[:count]


def has_devices() -> bool:
    """Whether this machine has a GPU."""
    return _num_devices() > 0 or bool(devices())


def _num_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _number(variable: str, setting: int | None, environ: Mapping[str, str]) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return setting
    number = parse_whole(text)
    if number is None:
        raise UsageError(f"{variable}={text[:60]!r} must be a whole number")
    return number


def check_size(spec: JobSpec, capacity: Slots) -> None:
    """Check that a job fits this machine when no other job runs.

    Raises:
        UsageError: the job does not fit.
    """
    gpu = spec.num_nodes * spec.gpu_per_node
    if gpu > capacity.gpu:
        raise UsageError(
            f"the job needs {gpu} GPU slots, and this machine has {capacity.gpu}; nothing was done",
            hint="request fewer GPUs",
        )
    # Ranks share cores, so only the number of ranks is limited.
    ranks = spec.num_nodes * spec.ranks_per_node
    most = min(_MOST_RANKS, _RANKS_PER_CORE * max(1, capacity.cpu))
    if ranks > most:
        raise UsageError(
            f"the job has {ranks} ranks on {spec.num_nodes} nodes, and this machine with {capacity.cpu} cores can "
            f"run at most {most}; nothing was done",
            hint="request fewer ranks; if the number of cores is wrong, set SAFEPOINT_CPU_SLOTS",
        )


def remark_on(spec: JobSpec, capacity: Slots) -> str:
    """A warning if a job requests more cores than the machine has (it still runs); otherwise empty."""
    cpu = spec.num_nodes * spec.cpu_per_node
    if cpu <= capacity.cpu:
        return ""
    return (
        f"the job requests {cpu} CPU slots, but this machine has only {capacity.cpu}; the job still runs, and its "
        f"ranks share the {plural(capacity.cpu, 'slot')}"
    )


def needs(job: JobRecord, capacity: Slots) -> Slots:
    """The slots that a job takes. A job that requests too many CPU slots takes all of them."""
    spec = job.spec
    return Slots(cpu=min(spec.num_nodes * spec.cpu_per_node, capacity.cpu), gpu=spec.num_nodes * spec.gpu_per_node)


def admit(name: str, jobs: Sequence[JobRecord], capacity: Slots) -> Admission:
    """Decide whether the waiting job `name` may start now.

    Args:
        name: the waiting job.
        jobs: all jobs that hold slots or wait for slots, including `name`.
        capacity: the slots of the machine.
    """
    asking = next(job for job in jobs if job.name == name)
    need = needs(asking, capacity)
    holding = [job for job in jobs if job.state.holds_slots and job.name != name]
    free = capacity - _sum(holding, capacity)
    room = free + _sum([job for job in holding if job.wanted is not RequestedAction.RUN], capacity)
    for job in (one for one in _waiting(jobs) if _order(one) < _order(asking)):
        need_before = needs(job, capacity)
        if free.holds(need_before):
            return Admission(waits_for=f"job {job.name}, which starts first")
        if room.holds(need_before):
            room -= need_before  # the earlier job takes the slots that other jobs are about to free
        elif (room + _sum(_preemptible(job, holding), capacity)).holds(need_before):
            return Admission(waits_for=f"job {job.name}, which starts first, after other jobs have stopped for it")
    if free.holds(need) and room.holds(need):
        return Admission(may_start=True)
    return _preempt(asking, need, room, holding, capacity)


def place_in_queue(name: str, jobs: Sequence[JobRecord]) -> int | None:
    """The position of a job among those that wait for slots, from 1; None for a job that does not wait."""
    names = [job.name for job in _waiting(jobs)]
    return names.index(name) + 1 if name in names else None


def _waiting(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """The jobs that wait for slots, in the order in which they are considered."""
    return sorted((job for job in jobs if job.state.is_waiting and job.wanted is RequestedAction.RUN), key=_order)


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
    for job in list(chosen):  # leave out each job that the jobs chosen after it have made unnecessary
        if (room - needs(job, capacity)).holds(need):
            room -= needs(job, capacity)
            chosen.remove(job)
    return Admission(preempt=tuple(job.name for job in chosen), waits_for="jobs of lower priority to stop")


def _preemptible(asking: JobRecord, holding: Sequence[JobRecord]) -> list[JobRecord]:
    """The jobs that `asking` may preempt."""
    return [job for job in holding if job.wanted is RequestedAction.RUN and job.spec.priority < asking.spec.priority]


def _sum(jobs: Sequence[JobRecord], capacity: Slots) -> Slots:
    return sum((needs(job, capacity) for job in jobs), Slots(cpu=0, gpu=0))


def _order(job: JobRecord) -> tuple[int, str, str]:
    return (-job.spec.priority, job.created, job.name)


def _describe(need: Slots, capacity: Slots) -> str:
    cpu = f"{need.cpu} of {capacity.cpu} CPU slots"
    return f"{cpu} and {need.gpu} of {capacity.gpu} GPU slots" if need.gpu else cpu


def free_gpus(taken: Sequence[str], count: int, pool: Sequence[str]) -> tuple[str, ...]:
    """The first `count` devices of the pool that are not taken."""
    free = [device for device in pool if device not in set(taken)]
    return tuple(free[:count])


HOLDING = tuple(state for state in JobState if state.holds_slots)
CONCERNED = tuple(state for state in JobState if state.holds_slots or state.is_waiting)
