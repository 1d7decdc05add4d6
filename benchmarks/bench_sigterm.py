"""Seconds from SIGTERM to the end of the job: Safepoint against the Trainer's own just-in-time checkpoint.

The same script with the same settings runs under both, interleaved, alone and with two ranks: `python -m
safepoint.training` against `python`, `safepoint run` against `torchrun`. The signal goes to the process that was
started, at a random moment of a step in mid-training, and the clock stops when that process has ended. For each
trial it is said whether a checkpoint of one step was left that can be resumed from: for Safepoint one that passes
its own verification, for the peer one without its marker of an unfinished save and with every rank's file.

The machine's limit is one step and the same bytes written and fsynced.
"""

import argparse
import datetime
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from figures import print_load, print_machine, row, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import TINY, Job, environment, no_orphans, read_events

from safepoint.checkpoint.format.verify import verify

GOAL_RATIO = 10
PHASES = ("signal → stop heard", "save and commit", "commit → leaving", "leaving → exit")


@dataclass(slots=True)
class Trial:
    """One job that was signalled."""

    seconds: float
    is_valid: bool
    exit_code: int
    remark: str
    sizes: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


def command(product: str, num_ranks: int, output: Path, options: argparse.Namespace) -> list[str]:
    program = [str(TINY), "--out", str(output), "--max-steps", "5000", "--samples", "50000", "--grad-accum", "1"]
    program += ["--logging-steps", "1", "--save-strategy", "no", "--step-ms", str(options.step_ms)]
    python = [sys.executable]
    ranks = ["--nproc-per-node", str(num_ranks)]
    if product == "safepoint":
        launcher = ["-m", "safepoint.training"] if num_ranks == 1 else ["-m", "safepoint.cli.main", "run", *ranks]
        return [*python, *launcher, *program]
    launcher = [] if num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", *ranks]
    return [*python, *launcher, *program, "--jit"]


def run_trial(product: str, num_ranks: int, folder: Path, delay_s: float, options: argparse.Namespace) -> Trial:
    output = folder / "output"
    log = folder / "log.txt"
    job = Job(command(product, num_ranks, output, options), output, log=log, env=environment(PYTHONUNBUFFERED="1"))
    with no_orphans(job):
        job.wait_for("loss lines", lambda: job.text.count("'loss'") >= options.steps, timeout_s=180)
        time.sleep(delay_s)
        watchdog = threading.Timer(options.limit_s, job.process.kill)
        watchdog.start()
        wall_s, started_s = time.time(), time.perf_counter()
        job.signal(signal.SIGTERM)
        exit_code = job.process.wait()  # without a timeout: the variant with one polls, up to 50 ms late
        seconds = time.perf_counter() - started_s
        watchdog.cancel()
    is_valid, remark = judge(product, num_ranks, output)
    trial = Trial(seconds=seconds, is_valid=is_valid, exit_code=exit_code, remark=remark)
    folders = list(output.glob("checkpoint-*"))
    trial.sizes = [path.stat().st_size for path in folders[0].rglob("*") if path.is_file()] if folders else []
    if product == "safepoint":
        trial.phases = phases(output, wall_s, wall_s + seconds)
    return trial


def judge(product: str, num_ranks: int, output: Path) -> tuple[bool, str]:
    """Whether one checkpoint of one step can be resumed from, and what was found."""
    folders = sorted(output.glob("checkpoint-*"))
    names = ", ".join(path.name for path in folders) or "no checkpoint"
    if len(folders) != 1:
        return False, names
    if product == "safepoint":
        faults = verify(folders[0]).faults
        return not faults, "; ".join(str(fault) for fault in faults) or names
    rng = ["rng_state.pth"] if num_ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(num_ranks)]
    needed = ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", *rng]
    missing = [name for name in needed if not (folders[0] / name).is_file()]
    if (folders[0] / "checkpoint-is-incomplete.txt").exists():
        missing.append("the end of the save")
    return not missing, f"{names} lacks {', '.join(missing)}" if missing else names


def phases(output: Path, signalled_s: float, ended_s: float) -> dict[str, float]:
    """Where the time went, from the run's own events; they carry milliseconds."""
    moments = [signalled_s]
    for name in ("stop_requested", "saved", "interrupted"):
        found = read_events(output, name)
        if not found:
            return {}
        moments.append(datetime.datetime.fromisoformat(found[-1]["time"]).timestamp())
    moments.append(ended_s)
    return dict(zip(PHASES, (after - before for before, after in itertools.pairwise(moments)), strict=True))


def limit_s(sizes: list[int], step_s: float, folder: Path) -> list[float]:
    """One step, and as many files of the same sizes written and fsynced."""
    seconds = []
    for turn in range(5):
        target = folder / f"limit-{turn}"
        started_s = time.perf_counter()
        target.mkdir()
        for index, size in enumerate(sizes):
            with (target / str(index)).open("wb") as file:
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds.append(time.perf_counter() - started_s + step_s)
    return seconds


def report(num_ranks: int, trials: dict[str, list[Trial]], limits: list[float]) -> None:
    print(f"\n   {num_ranks} rank{'s' if num_ranks > 1 else ''}: seconds from SIGTERM to the end of the job")
    for product, done in trials.items():
        print(row(product, [trial.seconds for trial in done], unit="s"))
        valid = sum(trial.is_valid for trial in done)
        codes = sorted({trial.exit_code for trial in done})
        print(f"     checkpoint of one step, fit for resume: {valid} of {len(done)}; exit codes {codes}")
        for remark in sorted({trial.remark for trial in done if not trial.is_valid}):
            print(f"     not fit: {remark}")
    print(row("limit: one step, the same bytes fsynced", limits, unit="s"))
    for phase in PHASES:
        print(row(f"  Safepoint: {phase}", [t.phases[phase] for t in trials["safepoint"] if t.phases], unit="s"))
    own, peer = ([trial.seconds for trial in trials[product]] for product in ("safepoint", "trainer jit"))
    print(
        f"   {'ratio to the limit (safepoint ÷ limit)':<46} {statistics.median(own) / statistics.median(limits):.2f}"
    )
    ratio = statistics.median(peer) / statistics.median(own)
    print(
        verdict("times sooner, medians (peer ÷ safepoint)", value=ratio, goal=GOAL_RATIO, at_most=False, unit="times")
    )
    print(f"   {'times sooner, minima':<46} {min(peer) / min(own):.3f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5, help="of each product, for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--steps", type=int, default=15, help="log lines to wait for before the signal")
    parser.add_argument("--limit-s", type=float, default=120, help="kill a job that has not ended by then")
    parser.add_argument("--seed", type=int, default=1, help="moment of the signal within a step")
    parser.add_argument("--folder", type=Path, help="keep the outputs here")
    options = parser.parse_args()
    print_machine("from SIGTERM to the end of the job")
    print(f"   {options.trials} trials each, steps of {options.step_ms:g} ms, seed {options.seed}")
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-") as temporary:
        root = options.folder or Path(temporary)
        for num_ranks in options.ranks:
            trials: dict[str, list[Trial]] = {"safepoint": [], "trainer jit": []}
            for number in range(options.trials):
                for product in list(trials) if number % 2 == 0 else list(trials)[::-1]:
                    folder = root / f"{num_ranks}-{number}-{product.split()[0]}"
                    folder.mkdir(parents=True)
                    delay_s = moments.uniform(0, options.step_ms / 1000)
                    trials[product].append(run_trial(product, num_ranks, folder, delay_s, options))
            sizes = next((trial.sizes for trial in trials["safepoint"] if trial.sizes), [])
            report(num_ranks, trials, limit_s(sizes, options.step_ms / 1000, folder))
    print_load("after")


if __name__ == "__main__":
    main()
