"""Seconds from SIGTERM to the committed checkpoint, and where they go: a tiny model, and 1.2 GB of state.

`safepoint run` gets the signal at a random moment of a step in mid-training. The parts are read from the run's own
events: the rest of the running step; the Trainer's save up to the first byte copied; copying, digest, writing, fsync
and commit, which go on side by side; leaving, until the started process has ended.

Goals: 0.15 s from the signal to the commit for the tiny model, whose steps take 50 ms; for the large one the rest of
the step and 1.2 times what the disk needs for the bytes. That limit is measured after each trial, with O_DIRECT
writes of 4 MiB from warm memory and an fsync.
"""

import argparse
import datetime
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from figures import print_load, print_machine, row, verdict
from snapshot_worker import ALIGNMENT, round_up, write_direct

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import TINY, Job, environment, no_orphans, read_events

from safepoint.checkpoint.format.verify import verify

PROGRAM = Path(__file__).parent / "trainer_program.py"
GOAL_TINY_S, GOAL_LARGE = 0.15, 1.2
PARTS = ("rest of the step", "save until the first copy", "copy, write and commit", "leaving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job that was signalled; seconds by part, the checkpoint's bytes and what the disk needs for them."""

    parts: dict[str, float]
    num_bytes: int
    write_s: float

    @property
    def committed_s(self) -> float:
        return sum(self.parts[part] for part in PARTS[:3])

    @property
    def beyond_limit(self) -> float:
        """What comes after the running step, over the disk's time for the bytes."""
        return (self.committed_s - self.parts[PARTS[0]]) / self.write_s


def program(size: str, output: Path, options: argparse.Namespace) -> list[str]:
    if size == "tiny":
        tiny = [str(TINY), "--out", str(output), "--max-steps", "5000", "--samples", "50000", "--grad-accum", "1"]
        return [*tiny, "--logging-steps", "1", "--step-ms", str(options.tiny_step_ms)]
    large = [str(PROGRAM), "--out", str(output), "--mb", str(options.mb), "--tokens", "16", "--max-steps", "5000"]
    return [*large, "--step-ms", str(options.step_ms)]


def run_trial(size: str, folder: Path, moments: random.Random, options: argparse.Namespace) -> Trial:
    output = folder / "output"
    command = [sys.executable, "-m", "safepoint.cli.main", "run", *program(size, output, options)]
    job = Job(command, output, log=folder / "log.txt", env=environment(PYTHONUNBUFFERED="1"))
    step_ms, num_steps = (options.tiny_step_ms, 15) if size == "tiny" else (options.step_ms, 3)
    with no_orphans(job):
        job.wait_for("attempt", lambda: job.events("attempt_started"), timeout_s=options.limit_s)
        job.wait_for_step(num_steps)
        time.sleep(moments.uniform(0, step_ms / 1000))
        signalled_s = time.time()
        job.signal(signal.SIGTERM)
        code = job.process.wait(options.limit_s)
        ended_s = time.time()
    if code != 75:
        raise SystemExit(f"exit code {code} in place of 75\n{job.text[-2000:]}")
    saved = read_events(output, "saved")[-1]
    stopped_s, saved_s = (_time_of(read_events(output, name)[-1]) for name in ("stop_requested", "saved"))
    checkpoint = output / f"checkpoint-{saved['step']}"
    faults = verify(checkpoint).faults
    if saved["trigger"] != "jit" or faults:
        raise SystemExit(f"no checkpoint was left that can be resumed from: {saved['trigger']} {faults}")
    begun_s = saved_s - saved["duration_s"]
    parts = dict(
        zip(
            PARTS,
            (stopped_s - signalled_s, begun_s - stopped_s, saved_s - begun_s, ended_s - saved_s),
            strict=True,
        )
    )
    size_bytes = saved["size_bytes"]
    return Trial(parts=parts, num_bytes=size_bytes, write_s=disk_s(folder, size_bytes))


def _time_of(event: dict[str, str]) -> float:
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


def disk_s(folder: Path, num_bytes: int) -> float:
    """The same bytes from warm memory past the page cache, and fsync."""
    with mmap.mmap(-1, round_up(num_bytes, ALIGNMENT)) as buffer:
        chunk = bytes(4 << 20)
        for start in range(0, len(buffer), len(chunk)):
            buffer[start : start + len(chunk)] = chunk[: len(buffer) - start]
        started_s = time.perf_counter()
        write_direct(folder / "limit", buffer, num_bytes)
        seconds = time.perf_counter() - started_s
    (folder / "limit").unlink()
    return seconds


def report(size: str, trials: list[Trial]) -> None:
    megabytes = trials[0].num_bytes / 1e6
    print(f"\n   {size} model, {megabytes:.1f} MB: seconds")
    for part in PARTS:
        print(row(part, [trial.parts[part] for trial in trials], unit="s"))
    print(row("from SIGTERM to the commit", [trial.committed_s for trial in trials], unit="s"))
    print(row("from SIGTERM to the exit", [sum(trial.parts.values()) for trial in trials], unit="s"))
    print(row("limit: O_DIRECT write and fsync", [trial.write_s for trial in trials], unit="s"))
    if size == "tiny":
        value = statistics.median(trial.committed_s for trial in trials)
        print(verdict("from SIGTERM to the commit", value=value, goal=GOAL_TINY_S, at_most=True, unit="s"))
    else:
        value = statistics.median(trial.beyond_limit for trial in trials)
        label = "after the step, over the disk's time"
        print(verdict(label, value=value, goal=GOAL_LARGE, at_most=True, unit="times"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5, help="of each size")
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "large"), default=["tiny", "large"])
    parser.add_argument("--tiny-step-ms", type=float, default=50)
    parser.add_argument("--mb", type=int, default=1200, help="of the large model with its optimizer")
    parser.add_argument("--step-ms", type=float, default=2000, help="of the large model, before its update")
    parser.add_argument("--limit-s", type=float, default=240, help="for one job to start, and to end")
    parser.add_argument("--seed", type=int, default=1, help="moment of the signal within a step")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    print_machine("from SIGTERM to the commit")
    print(f"   {options.trials} trials each, seed {options.seed}")
    moments = random.Random(options.seed)
    for size in options.sizes:
        trials: list[Trial] = []
        for _ in range(options.trials):
            with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
                trials.append(run_trial(size, Path(temporary), moments, options))
            os.sync()
        report(size, trials)
    print_load("after")


if __name__ == "__main__":
    main()
