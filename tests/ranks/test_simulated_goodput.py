"""The simulation of `safepoint plan simulate` against a real job that is killed at random by the same model.

Both get the same interruptions. The simulation gets what the machine is like from the run itself: how long a step
takes, how long a snapshot stalls it, and how long restarts after each kind of interruption take on average. What is
compared is what becomes of the time: which work is kept, which is done again, and what interrupted restarts cost.
"""

import contextlib
import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from safepoint.planning.failures import Cause, Hazard
from safepoint.planning.policies import OnNotice, Plan
from safepoint.planning.simulation import replay, simulate
from tests.support.jobs import Job, committed_steps, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.long]

STEP_MS = 100
SNAPSHOT_STEPS = 10
SAVE_EVERY_S = 30.0
BETWEEN_S = float(os.environ.get("SAFEPOINT_TEST_MTBF", "75"))
DURATION_S = float(os.environ.get("SAFEPOINT_TEST_GOODPUT_S", "600"))
SEED = int(os.environ.get("SAFEPOINT_TEST_SEED", "41"))
"""The default has interruptions of every kind in ten minutes."""
HAZARDS = (
    Hazard(cause=Cause.RANKS, per_s=0.3 / BETWEEN_S),
    Hazard(cause=Cause.MACHINE, per_s=0.5 / BETWEEN_S),
    Hazard(cause=Cause.PREEMPTION, per_s=0.2 / BETWEEN_S, notice_s=30.0),
)


class Run:
    """A job that is started again whenever it ends, and what was measured of it."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.job = start(output)
        self.restarts_s: dict[Cause, list[float]] = {hazard.cause: [] for hazard in HAZARDS}
        """From an interruption until the end of the second step after it: the first step is slow."""
        self.worked_s = 0.0
        self.num_steps = 0
        """Of the stretches between two interruptions, from the second step on."""
        self._pending: tuple[Cause, float] | None = None
        self._marks = 0
        self._began: tuple[float, int] | None = None

    def num_marks(self) -> int:
        """How many steps have begun, in all starts together."""
        with contextlib.suppress(OSError):
            return (self.output / "marks-0").read_bytes().count(b"\n")
        return 0

    def step(self) -> int:
        """How many steps are done, from the mark of the running one."""
        return int((self.output / "marks-0").read_text().split("\n")[-2].split()[1])

    @property
    def is_down(self) -> bool:
        """Whether it is restarting."""
        return self._pending is not None

    def works(self) -> None:
        """Record that the ranks train."""
        self._began = (time.monotonic(), self.step())

    def stops(self) -> None:
        """Record that they do not any more."""
        if self._began is not None:
            self.worked_s += time.monotonic() - self._began[0]
            self.num_steps += self.step() - self._began[1]
            self._began = None

    def interrupt(self, cause: Cause) -> None:
        self.stops()
        self._marks = self.num_marks()
        if cause is Cause.RANKS:
            self._kill_ranks()
        elif cause is Cause.MACHINE:
            self.job.kill_everything()
        elif self.job.process.poll() is None:
            self.job.signal()
        self._pending = (cause, time.monotonic())

    def _kill_ranks(self) -> None:
        """Also those that are starting: a launcher without ranks is waited for."""
        pids: list[int] = []
        while not pids:
            self._start_again()
            pids = ranks_below(self.job.process.pid)
            time.sleep(0.01)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start_again(self) -> None:
        if self.job.process.poll() is not None:
            self.job = start(self.output)

    def watch_until(self, end_s: float) -> None:
        """Start the job again when it ends, and measure restarts, until this time."""
        while (now_s := time.monotonic()) < end_s:
            self._start_again()
            if self._pending is not None and self.num_marks() >= self._marks + 3:
                cause, began_s = self._pending
                self.restarts_s[cause].append(now_s - began_s)
                self._pending = None
                self.works()
            time.sleep(min(0.01, max(0.0, end_s - now_s)))


def start(output: Path) -> Job:
    program = tiny(
        output, "--max-steps", "1000000", "--grad-accum", "1", "--step-ms", str(STEP_MS), "--logging-steps", "100000"
    )
    options = (
        "--save-every",
        f"{SAVE_EVERY_S:g}s",
        "--snapshot-steps",
        str(SNAPSHOT_STEPS),
        "--max-restarts",
        "1000",
    )
    return safepoint(output, *options, program=program)


def ranks_below(launcher: int) -> list[int]:
    """The training processes that this launcher has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"safepoint.training" in Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(word))
    return found


def draw_trace() -> list[tuple[float, int]]:
    """Seconds between interruptions, and the numbers of their hazards, for longer than the run."""
    generator = random.Random(SEED)
    trace: list[tuple[float, int]] = []
    while sum(gap_s for gap_s, _ in trace) < DURATION_S:
        gap_s = generator.expovariate(1 / BETWEEN_S)
        trace.append((gap_s, generator.choices(range(len(HAZARDS)), [hazard.per_s for hazard in HAZARDS])[0]))
    return trace


@pytest.mark.timeout(DURATION_S + 900)
def test_goodput_is_as_simulated(tmp_path: Path) -> None:
    """Kills of ranks, of all processes, and SIGTERM, at random; the ETTR is within 5 % of the simulated one."""
    print(f"seed {SEED}, interruptions every {BETWEEN_S:g} s, load {os.getloadavg()}")
    run, trace = Run(tmp_path / "out"), draw_trace()
    try:
        run.job.wait_for("the first steps", lambda: run.num_marks() >= 3)
        run.works()
        begin_s, first, at_s = time.monotonic(), run.step(), 0.0
        for gap_s, number in trace:
            at_s += gap_s
            run.watch_until(begin_s + min(at_s, DURATION_S))
            if at_s >= DURATION_S:
                break
            run.interrupt(HAZARDS[number].cause)
        took_s, newest = time.monotonic() - begin_s, run.step()
        is_down = run.is_down
        run.stops()
    finally:
        if run.job.process.poll() is None:
            run.job.kill_everything()

    # At the end of a restart, the last mark may be of work that was lost.
    done = (max(committed_steps(run.output)) if is_down else newest) - first
    snapshots = run.job.events("snapshot_taken")
    stall_s = statistics.median(event["stall_s"] for event in snapshots)
    pauses_s = stall_s * run.num_steps / SNAPSHOT_STEPS
    step_s = (run.worked_s - pauses_s) / run.num_steps
    measured = done * step_s / took_s
    plan = plan_of(step_s, stall_s, run.restarts_s)
    replayed = replay(plan, HAZARDS, trace, duration_s=DURATION_S)
    model = simulate(plan, HAZARDS, duration_s=DURATION_S, num_trials=1000, seed=SEED)
    spread = statistics.stdev(trial.ettr for trial in model.trials)
    print(f"step {step_s:.4f} s, stall {stall_s:.4f} s, load {os.getloadavg()}")
    print("restarts:", {str(cause): [f"{value:.1f}" for value in times] for cause, times in run.restarts_s.items()})
    print(f"measured {measured:.4f}, simulated with the same interruptions {replayed.ettr:.4f}: {replayed}")
    print(f"other interruptions of the model: {model.ettr.mean:.4f}, a run varies by {spread:.4f}")
    assert replayed.ettr == pytest.approx(measured, rel=0.05)
    assert abs(model.ettr.mean - measured) < 3 * spread


def plan_of(step_s: float, stall_s: float, restarts_s: dict[Cause, list[float]]) -> Plan:
    """What the job does, with what was measured. Restarts contain their loading, and that on SIGTERM its save."""
    every = [value for times in restarts_s.values() for value in times]
    # The work of the two steps in which a restart is noticed is not a part of the restart.
    mean_s = {cause: statistics.mean(times or every) - 2 * step_s for cause, times in restarts_s.items()}
    machine_s = mean_s[Cause.MACHINE]
    return Plan(
        interval_s=SAVE_EVERY_S - stall_s,
        stall_s=stall_s,
        durable_s=stall_s + 0.1,
        copied_s=stall_s + step_s,
        on_notice=OnNotice.SAVE,
        notice_needed_s=max(0.0, mean_s[Cause.PREEMPTION] - machine_s),
        keeps_memory=True,
        snapshot_every_s=SNAPSHOT_STEPS * step_s,
        snapshot_stall_s=stall_s,
        ranks_restart_s=mean_s[Cause.RANKS],
        machine_restart_s=machine_s,
    )
