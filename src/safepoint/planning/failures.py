"""How often trainings are interrupted: published failure models, queues that preempt, and spot machines.

Every source of interruptions is a Poisson process, so all sources together are a Poisson process, too: the time to
the next interruption is exponential with the sum of the rates, and its cause is drawn by the shares of the rates.
Repairs, ageing and bad machines that fail again and again are not modelled. Interruptions from these causes would
come in bursts.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass

DAY_S = 86_400.0


class Cause(enum.StrEnum):
    """The kind of an interruption. The kind decides which state survives the interruption."""

    RANKS = "ranks"
    """Processes end; the memory of their machine stays."""
    MACHINE = "machine"
    """A machine is lost with its memory and its disks."""
    RACK = "rack"
    """All machines of a rack are lost at once."""
    PREEMPTION = "preemption"
    """A queue stops the whole job, and announces the stop with SIGTERM. The job waits until it is admitted again."""
    RECLAIM = "reclaim"
    """A cloud takes a spot machine back, after an announcement."""
    MAINTENANCE = "maintenance"
    """The job is stopped for planned work, with SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """One source of interruptions of one job.

    Args:
        cause: the kind of the interruptions.
        per_s: the mean number of interruptions in a second in which the job runs.
        notice_s: seconds from the announcement until the processes are killed; 0 without an announcement.
        waiting_s: mean seconds until the job may start again, without the time of the restart itself.
    """

    cause: Cause
    per_s: float
    notice_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """How often each machine, rack and job is interrupted. Rates are per day, and 0 by default.

    Args:
        name: its name in tables.
        source: the publication that has the rates.
        machine_per_day: failures of each machine, of all kinds.
        ranks_share: the share of these failures that end only processes, from 0 to 1.
        maintenance_share: the share of these failures that are planned and announced, from 0 to 1.
        rack_per_day: failures of each rack as a whole.
        machines_per_rack: how many machines a rack has.
        preemptions_per_day: how often a queue preempts the job.
        preemption_notice_s: the grace period of the job at a preemption or maintenance, in seconds.
        waiting_s: mean time in the queue after a preemption, in seconds.
        reclaims_per_day: how often each machine is reclaimed as a spot machine.
        reclaim_notice_s: seconds from the announcement of a reclaim until the machine is gone.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    source: str = ""
    machine_per_day: float = 0.0
    ranks_share: float = 0.0
    maintenance_share: float = 0.0
    rack_per_day: float = 0.0
    machines_per_rack: int = 16
    preemptions_per_day: float = 0.0
    preemption_notice_s: float = 30.0
    waiting_s: float = 0.0
    reclaims_per_day: float = 0.0
    reclaim_notice_s: float = 120.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value!r}, and must be a finite number, not below 0")
        if self.machines_per_rack < 1:
            raise ValueError(f"machines_per_rack is {self.machines_per_rack!r}, and must be at least 1")
        if self.ranks_share + self.maintenance_share > 1:
            raise ValueError(
                f"ranks_share ({self.ranks_share!r}) and maintenance_share ({self.maintenance_share!r}) are "
                "shares of the same failures, and add up to more than 1: reduce one of them"
            )

    def hazards(self, num_machines: int) -> tuple[Hazard, ...]:
        """The sources of interruptions of a job on this many machines. The loss of one machine stops the job."""
        if num_machines < 1:
            raise ValueError(f"num_machines is {num_machines!r}, and must be at least 1")
        failures = self.machine_per_day * num_machines
        racks = math.ceil(num_machines / self.machines_per_rack)
        lost = 1 - self.ranks_share - self.maintenance_share
        found = (
            (Cause.RANKS, failures * self.ranks_share, 0.0, 0.0),
            (Cause.MACHINE, failures * lost, 0.0, 0.0),
            (Cause.MAINTENANCE, failures * self.maintenance_share, self.preemption_notice_s, 0.0),
            (Cause.RACK, self.rack_per_day * racks, 0.0, 0.0),
            (Cause.PREEMPTION, self.preemptions_per_day, self.preemption_notice_s, self.waiting_s),
            (Cause.RECLAIM, self.reclaims_per_day * num_machines, self.reclaim_notice_s, 0.0),
        )
        return tuple(
            Hazard(cause=cause, per_s=per_day / DAY_S, notice_s=notice_s, waiting_s=waiting_s)
            for cause, per_day, notice_s, waiting_s in found
            if per_day > 0
        )


def between_s(hazards: tuple[Hazard, ...]) -> float:
    """Mean seconds between two interruptions; `math.inf` if there are none."""
    per_s = sum(hazard.per_s for hazard in hazards)
    return 1 / per_s if per_s else math.inf


_HPCA = "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025"

MODELS = {
    model.name: model
    for model in (
        FailureModel(
            name="meta-rsc1",
            source=f"{_HPCA}: 6.50 failures in 1,000 node-days, A100, 16k GPUs",
            machine_per_day=6.50e-3,
        ),
        FailureModel(
            name="meta-rsc2",
            source=f"{_HPCA}: 2.34 failures in 1,000 node-days, A100, 8k GPUs",
            machine_per_day=2.34e-3,
        ),
        FailureModel(
            name="llama3",
            source="The Llama 3 Herd of Models, 2024: 466 interruptions in 54 days on 2,048 machines (H100), "
            "47 of them planned; 61 were bugs of the software and timeouts of NCCL, which need no other machine",
            machine_per_day=466 / 54 / 2048,
            ranks_share=61 / 466,
            maintenance_share=47 / 466,
            preemption_notice_s=600.0,
        ),
        FailureModel(
            name="byterobust",
            source="Wan et al., Robust LLM Training Infrastructure at ByteDance, SOSP 2025, table 4: 175 incidents "
            "in three months on 1,200 machines (Hopper), 20 of them manual restarts and 27 hangs and rollbacks",
            machine_per_day=175 / 90 / 1200,
            ranks_share=27 / 175,
            maintenance_share=20 / 175,
            preemption_notice_s=600.0,
        ),
        FailureModel(
            name="queue",
            source="Red Hat's article on just-in-time checkpoints: 4 preemptions of a job in a week, grace of 10 "
            "minutes",
            preemptions_per_day=4 / 7,
            preemption_notice_s=600.0,
        ),
        FailureModel(
            name="spot",
            source="AWS announces the end of a spot instance 2 minutes before; one reclaim of a machine in 20 days "
            "is an assumption",
            reclaims_per_day=1 / 20,
            reclaim_notice_s=120.0,
        ),
    )
}
"""The published models, by name."""
