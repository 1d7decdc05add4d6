"""What failures cost: the progress of a job whose ranks are killed once a minute, against one without failures.

The same Trainer script (`restart_program.py`), with two ranks, runs under `safepoint run` and under `torchrun` with
the Trainer's own resume. The products take turns, in blocks of some minutes. Each block is a job of its own, and its
time begins a moment after its first step. Once a minute, at a random moment of the minute, which is the same for both
products, one rank gets SIGKILL; if the job is restarting then, it gets it after the next step. *Progress* is the
number of steps that the job has moved on by the end of the block: steps that a restart repeats do not count twice.
Goodput is the progress divided by that of the same product without failures in the same time.

Safepoint chooses its intervals (`--save-every auto --snapshot-steps auto`). torchrun's is the best one by Young's
formula, the square root of 2 · C · M, where M is the time between failures and C the time that a save of the
Trainer takes, which is measured first (J. W. Young, "A first order approximation to the optimum checkpoint interval",
1974).

Goals: 95 % of the progress without failures, and 1.5 times the progress under torchrun. A job that makes no step for
two minutes is counted as hung, ended, and started again, as a cluster would do.
"""

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import print_load, print_machine, row, verdict
from process_family import MARK, end
from restart_jobs import PROGRAM, marks_of

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import environment

GOAL_OF_OWN, GOAL_OF_PEER = 0.95, 1.5
_HUNG_S = 120.0
_SETTLES_S = 5.0
"""After the first step, until the time of a block begins: the first steps are slow."""


@dataclass(slots=True)
class Block:
    """What one job did in its time.

    Args:
        steps: its progress.
        took_s: its time.
        save_s: the median time that a save of the Trainer took; 0 without saves.
        num_killed: the ranks killed.
        num_hung: how often it was started again because it made no step.
    """

    steps: int = 0
    took_s: float = 0.0
    save_s: float = 0.0
    num_killed: int = 0
    num_hung: int = 0


class Job:
    """A job, and what it reports of itself."""

    def __init__(self, command: Sequence[str], folder: Path, options: argparse.Namespace, save_steps: int) -> None:
        folder.mkdir()
        self._ranks, self._folder, self._mark = options.ranks, folder, folder.name
        program = [str(PROGRAM), "--out", str(folder / "output"), "--marks", str(folder), "--progress"]
        program += ["--mb", str(options.state_mb), "--step-ms", str(options.step_ms), "--save-steps", str(save_steps)]
        self._command = [*command, *program, *(["--resume"] if "torch.distributed.run" in command else [])]
        self.start()

    def start(self) -> None:
        """Start it, also again."""
        with (self._folder / "log.txt").open("ab") as stream:
            self._process = subprocess.Popen(
                self._command,
                stdout=stream,
                stderr=stream,
                env=environment(**{MARK: self._mark, "PYTHONUNBUFFERED": "1"}),
            )

    def stop(self) -> None:
        """End all of its processes at once."""
        self._process.kill()
        self._process.wait()
        end(self._mark, grace_s=0.5)

    @property
    def step(self) -> int:
        """The step that rank 0 has finished last; 0 before the first one."""
        return int((self._lines("progress") or ["0"])[-1])

    def save_s(self) -> float:
        """The median of the times that saves took; 0 without saves."""
        return statistics.median(map(float, self._lines("saves") or ["0"]))

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().split() if path.exists() else []

    def pid_of(self, rank: int) -> int | None:
        """The process of a rank, if it lives and has made a step."""
        starts = marks_of(self._folder, self._ranks)
        pid = starts[-1][rank]["pid"] if starts else None
        return pid if pid is not None and Path(f"/proc/{pid}").exists() else None

    def check(self) -> None:
        """End the benchmark if the job has ended."""
        if self._process.poll() is not None:
            raise SystemExit(f"the job ended:\n{(self._folder / 'log.txt').read_text()[-3000:]}")


def run_block(job: Job, seconds: float, kills: Sequence[float], ranks: Sequence[int]) -> Block:
    """Let a job run for a time, with ranks killed at moments in seconds after the block's begin."""
    found = Block()
    _await_first_step(job)
    time.sleep(_SETTLES_S)
    first, began_s = job.step, time.monotonic()
    pending = list(zip(kills, ranks, strict=True))
    moved_s, last = began_s, first
    while (now_s := time.monotonic()) - began_s < seconds:
        job.check()
        if job.step != last:
            moved_s, last = now_s, job.step
        elif now_s - moved_s > _HUNG_S:
            found.num_hung += 1
            job.stop()
            job.start()
            moved_s = now_s
        if pending and now_s - began_s >= pending[0][0] and (pid := job.pid_of(pending[0][1])) is not None:
            os.kill(pid, signal.SIGKILL)
            found.num_killed += 1
            pending.pop(0)
        time.sleep(0.005)
    found.steps, found.took_s, found.save_s = job.step - first, time.monotonic() - began_s, job.save_s()
    return found


def _await_first_step(job: Job) -> None:
    began_s = time.monotonic()
    while job.step == 0:
        job.check()
        if time.monotonic() - began_s > 5 * _HUNG_S:
            raise SystemExit("the job made no first step")
        time.sleep(0.01)


def moments(options: argparse.Namespace, number: int) -> tuple[list[float], list[int]]:
    """When the ranks of a block are killed, and which."""
    chance = random.Random(options.seed + number)
    count = int(options.block_s / options.between_s)
    at_s = [(index + chance.random()) * options.between_s for index in range(count)]
    return at_s, [chance.randrange(options.ranks) for _ in at_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--between-s", type=float, default=60, help="one failure in each such time")
    parser.add_argument("--blocks", type=int, default=4, help="of each product with failures")
    parser.add_argument("--block-s", type=float, default=300)
    parser.add_argument("--without-s", type=float, default=60, help="of a block without failures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--state-mb", type=int, default=100, help="of model and optimizer")
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    ranks = ["--nproc-per-node", str(options.ranks), "--max-restarts", "10000"]
    own = [sys.executable, "-m", "safepoint.cli.main", "run", *ranks, "--preload"]
    own += ["--save-every", "auto", "--snapshot-steps", "auto"]
    peer = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
    print_machine("goodput")
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
        numbers = iter(range(1000))

        def run(command: Sequence[str], save_steps: int, seconds: float, number: int | None = None) -> Block:
            job = Job(command, Path(temporary) / f"{next(numbers)}-{os.getpid()}", options, save_steps)
            try:
                block = run_block(job, seconds, *(([], []) if number is None else moments(options, number)))
            finally:
                job.stop()
            print(f"   {' '.join(command[2:4])}: {block}", file=sys.stderr)
            return block

        first = run(peer, 20, options.without_s)
        interval_s = math.sqrt(2 * first.save_s * options.between_s)
        best_steps = max(1, round(interval_s / (options.step_ms / 1000)))
        own_runs, peer_runs, own_free, peer_free = [], [], [], []
        for number in range(options.blocks):
            own_free.append(run(own, best_steps, options.without_s))
            peer_free.append(run(peer, 1_000_000, options.without_s))
            pair = [(own, own_runs), (peer, peer_runs)]
            for command, found in pair if number % 2 == 0 else pair[::-1]:
                found.append(run(command, best_steps, options.block_s, number))
    report(options, first.save_s, best_steps, own_runs, peer_runs, own_free, peer_free)


def report(options: argparse.Namespace, save_s: float, best_steps: int, *products: list[Block]) -> None:
    """Print the figures. `products`: Safepoint's blocks and torchrun's with failures, then without."""
    print(f"   {options.ranks} ranks, {options.state_mb} MB of state, steps of {options.step_ms:g} ms")
    print(f"   torchrun saves every {best_steps} steps; a save takes {save_s:.3f} s")
    rates = []
    names = ("safepoint", "torchrun", "safepoint, no failures", "torchrun, no failures and no saves")
    for name, blocks in zip(names, products, strict=True):
        each = [block.steps / block.took_s for block in blocks]
        rates.append(sum(block.steps for block in blocks) / sum(block.took_s for block in blocks))
        killed, hung = sum(block.num_killed for block in blocks), sum(block.num_hung for block in blocks)
        print(row(name, each, unit="steps/s") + f"   ranks killed {killed}, hung {hung}")
    own, peer, own_free, peer_free = rates
    print(verdict("goodput of safepoint", value=own / own_free, goal=GOAL_OF_OWN, at_most=False, unit=""))
    print(f"   {'against torchrun without failures and saves':<46} {own / peer_free:.3f}")
    print(f"   {'goodput of torchrun':<46} {peer / peer_free:.3f}")
    print(verdict("safepoint / torchrun, with failures", value=own / peer, goal=GOAL_OF_PEER, at_most=False, unit=""))
    print_load("after")


if __name__ == "__main__":
    main()
