"""The policies of different programs for interruptions, and the cost of their saves on a number of ranks.

The costs of the platform are the same for all programs. The other costs come from this project's benchmarks
(docs/benchmarks.md):

- The Trainer's save stalls for 1.30 times what the disk needs (Snapshots, 2026-11-22: 1.015 s and 0.783 s).
- DLRover's copy at the boundary takes 63 ms for each GB of a rank (CUDA models, H200, 2026-11-26: to copy all tensors
  to the host at the boundary takes 378 ms for 5.99 GB). The copy is durable after 2.03 times what the disk needs
  (Snapshots, 2026-11-22: 1.587 s and 0.783 s).
- A save of Safepoint stalls for 1.2 ms, and 0.19 ms for each GB of a rank. Neither was measured by itself. Their sum
  for 5.99 GB is 2.3 ms, which is more than CUDA models measured for 5.99 GB (2026-11-26): a call that saves takes
  1.45 ms, and a save stalls for 0.003 times the 378 ms, which is 1.1 ms. Its snapshot is
  complete after 19 ms for each GB (53 GB/s). The save is durable after 1.04 times what the disk needs (Snapshots,
  2026-11-22: 0.814 s and 0.783 s).
- After SIGTERM, Safepoint needs the rest of the step and 0.06 s before it saves; the Trainer first waits for 3 s
  (SIGTERM, 2026-11-21).
- Loading from memory takes 0.59 s for each GB of a rank (Restart from memory, 2026-11-21).
"""

import enum
import math
from dataclasses import dataclass, replace

from safepoint.estimates.interval import Interruptions, SaveTimes, best_interval_s, productive_share
from safepoint.planning.commit_costs import Platform, commit_cost
from safepoint.planning.failures import Cause, Hazard, between_s

MEASURED = "docs/benchmarks.md, 2026-11-21 to 2026-11-26"
_GB = 1e9
_SNAPSHOT_SHARE = 0.01
"""`--snapshot-steps auto` takes snapshots as often as possible, but for at most this share of the training time."""


class OnNotice(enum.StrEnum):
    """What a program does when it receives SIGTERM."""

    SAVE = "save"
    """It saves the step that was just done."""
    NEWEST_SNAPSHOT = "newest snapshot"
    """It makes the newest snapshot durable."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a program saves, and the costs of its saves.

    Args:
        name: its name in tables.
        description: one sentence.
        fixed_interval_s: seconds of work between saves; None for the best interval, which depends on the
            costs of the policy and on the failures.
        longest_interval_s: the upper limit of the best interval, in seconds.
        on_notice: what the program does on SIGTERM.
        notice_delay_s: seconds from SIGTERM until the save begins, in addition to the rest of the step.
        stall_s: how long a save stalls training, in addition to the next two fields.
        stall_s_per_gb: the stall for each GB of a rank.
        stall_of_write: the stall for each second of writing. With 1 and more, training waits for the whole save.
        copied_s_per_gb: the time from the beginning of a save until the snapshot is complete, for each GB of a rank.
        write_factor: the time of a save, divided by the time that the disk needs for its bytes.
        keeps_memory: whether the newest snapshot survives the end of the ranks.
        replicates: whether a machine in another rack has the newest snapshot too.
        snapshots: whether the program also takes snapshots between its saves, as often as possible in 1 % of the
            time.
        votes: whether all ranks vote in each step.
        exists: whether a program offers this policy today.
    """

    name: str
    description: str
    fixed_interval_s: float | None = None
    longest_interval_s: float = math.inf
    on_notice: OnNotice = OnNotice.NOTHING
    notice_delay_s: float = 0.0
    stall_s: float = 0.0
    stall_s_per_gb: float = 0.0
    stall_of_write: float = 0.0
    copied_s_per_gb: float = 0.0
    write_factor: float = 1.0
    keeps_memory: bool = False
    replicates: bool = False
    snapshots: bool = False
    votes: bool = False
    exists: bool = True


class Kept(enum.Enum):
    """The part of the work that is left after an interruption."""

    ALL = 0
    SNAPSHOT = 1
    DURABLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy on a number of ranks: all values that a simulation needs, in seconds.

    Args:
        interval_s: work between two saves; `math.inf` if saves are made only on an announcement.
        stall_s: how long a save stalls training.
        durable_s: the time from the beginning of a save until it is durable, at least `stall_s`.
        copied_s: the time from the beginning of a save until its snapshot in memory is complete, at least `stall_s`.
        on_notice: what happens on an announcement.
        notice_needed_s: the time from an announcement until everything is durable.
        keeps_memory: whether the newest snapshot survives the end of the ranks.
        replicates: whether the newest snapshot survives the loss of a machine or a rack.
        snapshot_every_s: work between two snapshots that are taken between saves; None if there are none.
        snapshot_stall_s: how long a snapshot between saves stalls training.
        ranks_restart_s: the time from the end of the ranks until training works again on the same machines, without
            loading.
        machine_restart_s: the time from the loss of a machine until training works again, without loading.
        load_s: the time to load the state from the store.
        load_memory_s: the time to load the state from memory, or from the memory of other machines.
        pace: the share of a step that the vote leaves for work.
    """

    interval_s: float
    stall_s: float
    durable_s: float
    copied_s: float
    on_notice: OnNotice = OnNotice.NOTHING
    notice_needed_s: float = 0.0
    keeps_memory: bool = False
    replicates: bool = False
    snapshot_every_s: float | None = None
    snapshot_stall_s: float = 0.0
    ranks_restart_s: float = 0.0
    machine_restart_s: float = 0.0
    load_s: float = 0.0
    load_memory_s: float = 0.0
    pace: float = 1.0

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError(f"interval_s is {self.interval_s!r}, and must be above 0")
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not value >= 0:
                raise ValueError(f"{name} is {value!r}, and must not be below 0")

    def keeps(self, hazard: Hazard) -> Kept:
        """The part of the work that is left after an interruption of this kind."""
        announced = hazard.notice_s > 0 and hazard.notice_s >= self.notice_needed_s
        if announced and self.on_notice is OnNotice.SAVE:
            return Kept.ALL
        if announced and self.on_notice is OnNotice.NEWEST_SNAPSHOT:
            return Kept.SNAPSHOT
        # If only processes end, the memory of their machines stays. In all other cases, the job leaves its machines,
        # and their memory is lost.
        if hazard.cause is Cause.RANKS and self.keeps_memory:
            return Kept.SNAPSHOT
        if hazard.cause in {Cause.MACHINE, Cause.RACK, Cause.RECLAIM} and self.replicates:
            return Kept.SNAPSHOT
        return Kept.DURABLE

    def restart_s(self, hazard: Hazard) -> float:
        """The time from the interruption until training works again, without the time in a queue."""
        kept = self.keeps(hazard)
        saving_s = self.notice_needed_s if kept is Kept.ALL else 0.0
        again_s = self.ranks_restart_s if hazard.cause is Cause.RANKS else self.machine_restart_s
        from_memory = kept is Kept.SNAPSHOT and hazard.cause not in {Cause.PREEMPTION, Cause.MAINTENANCE}
        return saving_s + again_s + (self.load_memory_s if from_memory else self.load_s)


def plan_of(policy: Policy, platform: Platform, num_ranks: int, hazards: tuple[Hazard, ...]) -> Plan:
    """The policy on this many ranks of the platform, with its interval chosen for these hazards."""
    gb = platform.state_bytes / _GB
    cost = commit_cost(platform, num_ranks)
    write_s = policy.write_factor * (cost.durable_s if policy.votes else cost.files_s)
    stall_s = policy.stall_s + gb * policy.stall_s_per_gb + policy.stall_of_write * write_s
    durable_s = max(stall_s, write_s)
    copied_s = max(stall_s, gb * policy.copied_s_per_gb)
    # The running step is finished first: half of it on average. Then everything is written.
    needed_s = policy.notice_delay_s + platform.step_s / 2 + durable_s
    every_s = whole_steps_s(stall_s / _SNAPSHOT_SHARE, platform.step_s) if policy.snapshots else None
    plan = Plan(
        interval_s=math.inf,
        stall_s=stall_s,
        durable_s=durable_s,
        copied_s=copied_s,
        on_notice=policy.on_notice,
        notice_needed_s=needed_s,
        keeps_memory=policy.keeps_memory,
        replicates=policy.replicates,
        snapshot_every_s=every_s,
        snapshot_stall_s=stall_s if every_s is not None else 0.0,
        ranks_restart_s=platform.ranks_restart_s,
        machine_restart_s=platform.machine_restart_s,
        load_s=platform.transfer_s(num_ranks),
        load_memory_s=0.59 * gb,
        pace=platform.step_s / (platform.step_s + cost.vote_s) if policy.votes and platform.step_s else 1.0,
    )
    if policy.fixed_interval_s is not None:
        return with_interval(plan, policy.fixed_interval_s, platform.step_s)
    if not hazards:
        return plan
    times, interruptions = estimate_of(plan, hazards)
    best_s = min(policy.longest_interval_s, best_interval_s(times, interruptions))
    return with_interval(plan, best_s, platform.step_s)


def with_interval(plan: Plan, interval_s: float, step_s: float) -> Plan:
    """The plan with another interval, in whole steps, and at least as long as a save takes to become durable."""
    return replace(plan, interval_s=whole_steps_s(max(interval_s, plan.durable_s - plan.stall_s), step_s))


def whole_steps_s(least_s: float, step_s: float) -> float:
    """The duration of the smallest number of steps that take at least `least_s`, at least one step.

    If `least_s` is `math.inf`, or if `step_s` is 0, the result is `least_s`.

    State can be saved only at the end of a step. So an interruption loses half a step on average, even if a save
    costs nothing.
    """
    if math.isinf(least_s) or not step_s:
        return least_s
    return max(1, math.ceil(least_s / step_s - 1e-9)) * step_s


def estimate_of(plan: Plan, hazards: tuple[Hazard, ...]) -> tuple[SaveTimes, Interruptions]:
    """The inputs of `safepoint.estimates.interval` for a plan and its hazards.

    The hazards are grouped into three kinds of interruptions. Each kind has the mean restart time of its hazards.
    """
    total = sum(hazard.per_s for hazard in hazards)
    share = dict.fromkeys(Kept, 0.0)
    restart_s = dict.fromkeys(Kept, 0.0)
    for hazard in hazards:
        kept = plan.keeps(hazard)
        share[kept] += hazard.per_s / total
        restart_s[kept] += hazard.per_s / total * plan.restart_s(hazard)
    means = {kept: restart_s[kept] / share[kept] if share[kept] else 0.0 for kept in Kept}
    times = SaveTimes(
        stall_s=plan.stall_s,
        durable_s=plan.durable_s,
        copied_s=plan.copied_s,
        restart_s=means[Kept.DURABLE],
        announced_restart_s=means[Kept.ALL],
        ranks_restart_s=means[Kept.SNAPSHOT],
        snapshot_every_s=plan.snapshot_every_s,
        snapshot_stall_s=plan.snapshot_stall_s,
    )
    announced = min(1.0, share[Kept.ALL])
    ranks_only = min(share[Kept.SNAPSHOT], 1 - announced)
    return times, Interruptions(between_s=between_s(hazards), announced=announced, ranks_only=ranks_only)


def expected_ettr(plan: Plan, hazards: tuple[Hazard, ...]) -> float:
    """The ETTR by the formula. If ranks resume from snapshots, the formula assumes that a snapshot
    is durable at once."""
    if not hazards:
        return (
            plan.pace
            if math.isinf(plan.interval_s)
            else plan.pace * plan.interval_s / (plan.interval_s + plan.stall_s)
        )
    return plan.pace * productive_share(plan.interval_s, *estimate_of(plan, hazards))


_SAFEPOINT = Policy(
    name="safepoint-jit",
    description="Safepoint without a keeper's memory: --save-every auto, and a save on SIGTERM.",
    on_notice=OnNotice.SAVE,
    notice_delay_s=0.06,
    stall_s=1.2e-3,
    stall_s_per_gb=0.19e-3,
    copied_s_per_gb=1 / 53,
    write_factor=1.04,
    votes=True,
)

POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            name="hf-hourly",
            description="Hugging Face's Trainer: saves every hour, and training waits.",
            fixed_interval_s=3600.0,
            stall_of_write=1.0,
            write_factor=1.30,
        ),
        Policy(
            name="hf-best",
            description="Hugging Face's Trainer with the best interval.",
            stall_of_write=1.0,
            write_factor=1.30,
        ),
        Policy(
            name="hf-jit",
            description="Hugging Face's Trainer with the best interval and enable_jit_checkpoint.",
            on_notice=OnNotice.SAVE,
            notice_delay_s=3.0,
            stall_of_write=1.0,
            write_factor=1.30,
        ),
        Policy(
            name="dlrover",
            description="DLRover's Flash Checkpoint: copies at a boundary, writes beside training, keeps the copy.",
            on_notice=OnNotice.NEWEST_SNAPSHOT,
            stall_s_per_gb=0.063,
            copied_s_per_gb=0.063,
            write_factor=2.03,
            keeps_memory=True,
        ),
        _SAFEPOINT,
        replace(
            _SAFEPOINT,
            name="safepoint",
            description="Safepoint: --save-every auto, a save on SIGTERM, and the keeper has the newest snapshot.",
            keeps_memory=True,
        ),
        replace(
            _SAFEPOINT,
            name="safepoint-snapshots",
            description="Like `safepoint`, with --snapshot-steps auto.",
            keeps_memory=True,
            snapshots=True,
        ),
        replace(
            _SAFEPOINT,
            name="safepoint-replicas",
            description="Like `safepoint-snapshots`, with copies of the snapshots in the memory of other machines. "
            "Safepoint cannot make these copies yet.",
            longest_interval_s=3600.0,
            keeps_memory=True,
            snapshots=True,
            replicates=True,
            exists=False,
        ),
    )
}
"""The policies that are compared, by name."""
