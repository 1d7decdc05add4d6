"""The part of `bench_restart.py` with whole jobs: how long starts and restarts take, and in which phases.

The same script (`restart_program.py`) runs under `safepoint run`, and under `torchrun` with the Trainer's own resume.
The products take turns. In each job, the last rank is killed with SIGKILL again and again, and the time runs until
all ranks have finished their next first step. The script notes the phases by itself, for both products alike. A job
that has not trained again after two minutes is counted as hung, and ended: ranks of torch 2.13 under torchrun
sometimes read the addresses of dead ranks (`safepoint.training.integrations.torch_store`).
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import row
from process_family import MARK, end, family

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jobs import environment, read_events

PROGRAM = Path(__file__).parent / "restart_program.py"
PHASES = ("begun_s", "imported_s", "context_s", "group_s", "called_s", "loaded_s", "stepped_s")
NAMES = {
    "begun_s": "script begun",
    "imported_s": "imports done",
    "context_s": "CUDA context made",
    "group_s": "first all-reduce done",
    "called_s": "train() called",
    "loaded_s": "state loaded",
    "stepped_s": "first step done",
}
_FIRST_LIMIT_S, _LIMIT_S = 300.0, 120.0


class HungError(Exception):
    """The job does not train again."""


@dataclass(slots=True)
class Starts:
    """What was measured of one product: seconds by phase, one number for each start."""

    first: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    again: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    processor_s: list[float] = field(default_factory=list)
    own: dict[str, list[float]] = field(default_factory=dict)
    """The phases of the restarts by Safepoint's event `start_timed`, in seconds since the failure was noticed."""
    num_hung: int = 0
    """Restarts after which the ranks did not train again. Each ended its job."""


def variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each product before the program."""
    ranks, python = ["--nproc-per-node", str(options.ranks)], [sys.executable]
    run = [*python, "-m", "safepoint.cli.main", "run", *ranks, "--max-restarts", "10000"]
    elastic = [*python, "-m", "torch.distributed.run", "--standalone", *ranks, "--max-restarts", "10000"]
    return {**{f"safepoint {' '.join(more)}".strip(): [*run, *more] for more in options.variant}, "torchrun": elastic}


def marks_of(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """For each start that all ranks have completed, the marks of its ranks."""
    lines = []
    for rank in range(ranks):
        path = folder / f"marks-{rank}"
        text = path.read_text().split("\n")[:-1] if path.exists() else []
        lines.append([json.loads(line) for line in text])
    return [list(of_start) for of_start in zip(*lines, strict=False)]


def wait(process: "subprocess.Popen[bytes]", log: Path, ready: Callable[[], Any], limit_s: float) -> Any:
    """Wait until `ready` returns something. The benchmark ends if the job ends before.

    Raises:
        HungError: it took longer than `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if found := ready():
            return found
        if process.poll() is not None:
            raise SystemExit(f"the job ended:\n{log.read_text()[-3000:]}")
        time.sleep(0.002)
    raise HungError


def newest_checkpoint(output: Path) -> int:
    """The step of the newest checkpoint that is complete, for both products; -1 without any."""
    return max(
        (int(path.parent.name.split("-")[1]) for path in output.glob("checkpoint-*/trainer_state.json")), default=-1
    )


def processor_s(mark: str) -> float:
    """The processor seconds that the processes of a job and their ended children have used."""
    ticks = 0
    for pid in family(mark):
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def run_job(command: list[str], folder: Path, moments: random.Random, options: argparse.Namespace) -> Starts:
    """One job: its first start, and its restarts."""
    is_peer = "torch.distributed.run" in command
    kills = options.kills if options.peer_kills is None or not is_peer else options.peer_kills
    folder.mkdir()
    output, log, mark = folder / "output", folder / "log.txt", folder.name
    program = [str(PROGRAM), "--out", str(output), "--marks", str(folder), "--mb", str(options.state_mb)]
    program += ["--step-ms", str(options.step_ms), "--save-steps", str(options.save_steps)]
    program += ["--device", options.device, *(["--backend", options.backend] if options.backend else [])]
    program += ["--resume"] if is_peer else []
    devices = {"CUDA_VISIBLE_DEVICES": "0"} if options.device == "cuda" else {}
    found = Starts()
    began_s = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *program],
            stdout=stream,
            stderr=stream,
            env=environment(**{MARK: mark, "PYTHONUNBUFFERED": "1"}, **devices),
        )
    try:
        for number in range(kills + 1):
            starts = wait(
                process,
                log,
                lambda n=number: len(all_ := marks_of(folder, options.ranks)) > n and all_,
                _LIMIT_S if number else _FIRST_LIMIT_S,
            )
            marks = starts[number]
            figures = found.again if number else found.first
            for phase in marks[0].keys() & figures.keys():
                figures[phase].append(max(one[phase] for one in marks) - began_s)
            if number == 0:
                found.processor_s.append(processor_s(mark))
            if number < kills:
                step = max(one["step"] for one in marks)
                wait(process, log, lambda least=step + 1: newest_checkpoint(output) >= least, _LIMIT_S)
                time.sleep(moments.uniform(0, 1) * options.step_ms / 1000)
                began_s = time.monotonic()
                os.kill(marks[-1]["pid"], signal.SIGKILL)
        for event in read_events(output, "start_timed") if output.exists() else []:
            if event["restart"]:
                for one in event["phases"]:
                    found.own.setdefault(one["phase"], []).append(one["at_s"])
    except HungError:
        found.num_hung = 1
    finally:
        process.kill()
        process.wait()
        end(mark, grace_s=0.5)
    return found


def measure(options: argparse.Namespace) -> None:
    """Run the jobs of all products in turns, and print the tables."""
    moments = random.Random(options.seed)
    commands = variants(options)
    found = {name: Starts() for name in commands}
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
        begun_s = time.monotonic()
        for number in range(options.jobs):
            if time.monotonic() - begun_s > options.limit_s:
                print(f"   the time is over after {number} jobs of each product", file=sys.stderr)
                break
            names = list(commands) if number % 2 == 0 else list(commands)[::-1]
            for name in names:
                folder = Path(temporary) / f"{number}-{list(commands).index(name)}-{os.getpid()}"
                one = run_job(commands[name], folder, moments, options)
                if options.logs is not None:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / "log.txt", options.logs / f"{folder.name}.txt")
                merge(found[name], one)
                # Also if the benchmark is stopped before its end.
                phases = {"first": one.first, "again": one.again, "start_timed": one.own}
                print(f"   job {number + 1} under {name}: {json.dumps(phases)}", file=sys.stderr)
    place = f"on {options.device}, over {options.backend or 'the usual backend'}"
    print(f"   {options.ranks} ranks {place}, {options.state_mb} MB of state, steps of {options.step_ms:g} ms")
    table("from the start of the command, median (minimum) in s", {n: one.first for n, one in found.items()})
    for name, one in found.items():
        print(row(f"processor time of a first start, {name}", one.processor_s, unit="s"))
    table("from kill -9 of a rank, median (minimum) in s", {n: one.again for n, one in found.items()})
    for name, one in found.items():
        again = sorted(one.again["stepped_s"])
        if again:
            p95 = again[min(len(again) - 1, int(0.95 * len(again)))]
            figures = f"median {statistics.median(again):.3f} s, p95 {p95:.3f} s, n {len(again)}"
            print(f"   {name}: {figures}, hung {one.num_hung}")
    for name, one in found.items():
        if one.own:
            print(f"\n   {name}: the event start_timed of the restarts, s after the notice")
            for phase, values in one.own.items():
                print(row(phase, values, unit="s"))


def merge(target: Starts, more: Starts) -> None:
    """Add the figures of one job to those of its product."""
    for phase in PHASES:
        target.first[phase] += more.first[phase]
        target.again[phase] += more.again[phase]
    target.processor_s += more.processor_s
    target.num_hung += more.num_hung
    for phase, values in more.own.items():
        target.own.setdefault(phase, []).extend(values)


def table(title: str, products: dict[str, dict[str, list[float]]]) -> None:
    """Print one table: a row for each phase, a column for each product."""
    print(f"\n   {title}")
    print(f"| the last rank | {' | '.join(products)} |")
    print("|---|" + "---|" * len(products))
    for phase in PHASES:
        if not any(one[phase] for one in products.values()) and phase in {"context_s", "group_s"}:
            continue  # a training on the CPU has no such phase
        cells = [
            f"{statistics.median(one[phase]):.2f} ({min(one[phase]):.2f})" if one[phase] else "no figure"
            for one in products.values()
        ]
        print(f"| {NAMES[phase]} | {' | '.join(cells)} |")
