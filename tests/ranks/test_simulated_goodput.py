"""The simulation of `safepoint plan simulate` against a real job that is killed at random by the same model."""

import contextlib
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from safepoint.planning.failures import Cause, Hazard
from safepoint.planning.policies import OnNotice, Plan
from safepoint.planning.simulation import replay, simulate
from tests.support.jobs import Job, safepoint, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.long]

STEP_MS = 100
SNAPSHOT_STEPS = 10
SAVE_EVERY_S = 4.0
BETWEEN_S = float(os.environ.get("SAFEPOINT_TEST_MTBF", "60"))
DURATION_S = float(os.environ.get("SAFEPOINT_TEST_GOODPUT_S", "420"))
SEED = int(os.environ.get("SAFEPOINT_TEST_SEED", "5"))
HAZARDS = (
    Hazard(cause=Cause.RANKS, per_s=0.4 / BETWEEN_S),
    Hazard(cause=Cause.MACHINE, per_s=0.3 / BETWEEN_S),
    Hazard(cause=Cause.PREEMPTION, per_s=0.3 / BETWEEN_S, notice_s=30.0),
)


@dataclass
class Run:
    """A job that is started again whenever it ends, and what was measured."""

    output: Path
    job: Job
    restarts_s: dict[Cause, list[float]] = field(default_factory=lambda: {hazard.cause: [] for hazard in HAZARDS})
    pending: tuple[Cause, float] | None = None
    marks: int = 0
    """How many micro-batches had begun when the pending interruption came."""

    def num_marks(self) -> int:
        with contextlib.suppress(OSError):
            return (self.output / "marks-0").read_bytes().count(b"\n")
        return 0

    def step(self) -> int:
        """How many steps are done, from the mark of the running one."""
        lines = (self.output / "marks-0").read_text().split("\n")[:-1]
        return int(lines[-1].split()[1])

    def start(self) -> None:
        self.job = start(self.output)

    def interrupt(self, cause: Cause) -> None:
        self.marks = self.num_marks()
        self.pending = (cause, time.monotonic())
        if self.job.process.poll() is not None:
            self.start()
        elif cause is Cause.RANKS:
            for pid in ranks_below(self.job.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif cause is Cause.MACHINE:
            self.job.kill_everything()
            self.start()
        else:
            self.job.signal()

    def watch_until(self, end_s: float, step_s: float) -> None:
        """Start the job again when it ends, and measure restarts, until this time."""
        while (now_s := time.monotonic()) < end_s:
            if self.job.process.poll() is not None:
                assert self.job.process.returncode in {75, 143} or self.pending, self.job.text
                self.start()
            # The first step after a start is cold, so the second one shows that training works again.
            if self.pending is not None and self.num_marks() >= self.marks + 2:
                cause, began_s = self.pending
                self.restarts_s[cause].append(now_s - began_s - step_s)
                self.pending = None
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


def measured_steps(run: Run) -> tuple[float, float]:
    """Seconds for each step without its saves, and for each save, of an undisturbed stretch."""
    begin_s, begin = time.monotonic(), run.step()
    run.watch_until(begin_s + 12, 0.0)
    took_s, steps = time.monotonic() - begin_s, run.step() - begin
    stalls = [event["stall_s"] for event in run.job.events("snapshot_taken")][-5:]
    stall_s = statistics.median(stalls)
    saves = steps / SNAPSHOT_STEPS + took_s / SAVE_EVERY_S
    return (took_s - saves * stall_s) / steps, stall_s


@pytest.mark.timeout(DURATION_S + 1200)
def test_goodput_is_as_simulated(tmp_path: Path) -> None:
    """Kills of ranks, of all processes, and SIGTERM, at random. Restarts are measured before, on the same machine."""
    print(f"seed {SEED}, load {os.getloadavg()}")
    run = Run(output=tmp_path / "out", job=start(tmp_path / "out"))
    try:
        run.job.wait_for("the first steps", lambda: run.num_marks() >= 3)
        step_s, stall_s = measured_steps(run)
        for _ in range(2):
            for hazard in HAZARDS:
                run.interrupt(hazard.cause)
                while run.pending is not None:
                    run.watch_until(time.monotonic() + 0.05, step_s)
                run.watch_until(time.monotonic() + 3, step_s)
        before = {cause: statistics.mean(times) for cause, times in run.restarts_s.items()}
        run.restarts_s = {hazard.cause: [] for hazard in HAZARDS}

        generator = random.Random(SEED)
        trace: list[tuple[float, int]] = []
        while sum(gap_s for gap_s, _ in trace) < DURATION_S:
            gap_s = generator.expovariate(1 / BETWEEN_S)
            trace.append((gap_s, generator.choices(range(3), [hazard.per_s for hazard in HAZARDS])[0]))
        begin_s, first, at_s = time.monotonic(), run.step(), 0.0
        for gap_s, number in trace:
            at_s += gap_s
            run.watch_until(begin_s + min(at_s, DURATION_S), step_s)
            if at_s >= DURATION_S:
                break
            run.interrupt(HAZARDS[number].cause)
        measured = (run.step() - first) * step_s / (time.monotonic() - begin_s)
    finally:
        if run.job.process.poll() is None:
            run.job.kill_everything()

    plan = plan_of(step_s, stall_s, before)
    replayed = replay(plan, HAZARDS, trace, duration_s=DURATION_S)
    model = simulate(plan, HAZARDS, duration_s=DURATION_S, num_trials=400, seed=SEED)
    print(f"step {step_s:.4f} s, stall {stall_s:.4f} s, load {os.getloadavg()}")
    print("restarts before:", {str(cause): f"{value:.1f} s" for cause, value in before.items()})
    print("in the run:", {str(cause): [f"{value:.1f}" for value in times] for cause, times in run.restarts_s.items()})
    print(f"measured {measured:.4f}, simulated with the same interruptions {replayed.ettr:.4f}: {replayed}")
    print(f"the model itself: {model.ettr}")
    assert replayed.ettr == pytest.approx(measured, rel=0.05)


def plan_of(step_s: float, stall_s: float, restart_s: dict[Cause, float]) -> Plan:
    """What the job does, with what was measured. Restarts contain their loading, and that on SIGTERM its save."""
    machine_s = restart_s[Cause.MACHINE]
    return Plan(
        interval_s=SAVE_EVERY_S - stall_s,
        stall_s=stall_s,
        durable_s=stall_s + 0.1,
        copied_s=stall_s + step_s,
        on_notice=OnNotice.SAVE,
        notice_needed_s=max(0.0, restart_s[Cause.PREEMPTION] - machine_s),
        keeps_memory=True,
        snapshot_every_s=SNAPSHOT_STEPS * step_s,
        snapshot_stall_s=stall_s,
        ranks_restart_s=restart_s[Cause.RANKS],
        machine_restart_s=machine_s,
    )
