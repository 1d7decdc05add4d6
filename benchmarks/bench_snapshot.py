"""A gigabyte of training state saved while training goes on: Safepoint against those who do it well, and the machine.

The state is that of AdamW in fp32, 228 tensors on the CPU, and training is real steps of it on one thread. Every
system runs in a process of its own, in turns within a round; who begins changes from round to round. Printed for
each: how long the call takes; how much longer a stretch of training steps gets through one save in it, whatever the
reason (the call, a wait before `optimizer.step`, a processor or memory bandwidth taken); call to durable, with
nothing beside it; the first save beside later ones; resident memory beyond the training's own.

Goals: the call at most 2 ms; training held up at most a fiftieth of DCP's async save as it comes, a hundredth of
Hugging Face's own, and no more than torch_checkpointing's; the first save at most 1.5 times a later one; durable
within 1.35 times what the disk needs for the bytes, at least 1.7 times sooner than dcp.save and 4 times sooner than
DLRover. Limits, measured in the same run: a warm copy by one thread, the disk past the page cache, both one after the
other as a bare save, and the commit of a small file. What cannot be run is named with the reason.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from figures import print_load, print_machine, row, verdict
from process_family import MARK, end
from snapshot_peers import SAFEPOINT, SYSTEMS, sweep
from snapshot_training import matmuls_for

NO_SAVE, LIMITS = "no save", "limits"
NOTHING = "-"  # in a cell of the table
DCP, DCP_ASYNC, DLROVER, TORCH_CHECKPOINTING, HF = (
    "dcp.save",
    "dcp async",
    "dlrover",
    "torch_checkpointing",
    "hf trainer",
)
COLUMNS = (
    *("system", "call", "stall", "by steps", "held", "durable", "fsync"),
    *("first call", "first durable", "start", "peak MB", "rest MB"),
)
GOAL_CALL_MS, GOAL_FIRST, GOAL_DURABLE = 2, 1.5, 1.35
GOAL_STALLS = {DCP_ASYNC: 50, HF: 100, TORCH_CHECKPOINTING: 1}
GOAL_SOONER = {DCP: 1.7, DLROVER: 4}
WORKER = Path(__file__).parent / "snapshot_worker.py"


@dataclass(slots=True)
class Figures:
    """What all rounds found about one system, in seconds and MB; `reason` where it could not be run."""

    reason: str = ""
    starts: list[float] = field(default_factory=list)
    first_calls: list[float] = field(default_factory=list)
    first_durables: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    durables: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    window_calls: list[float] = field(default_factory=list)
    with_save: list[list[float]] = field(default_factory=list)
    without_save: list[list[float]] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)
    peaks_mb: list[float] = field(default_factory=list)
    rests_mb: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    num_bytes: int = 0
    warm_copies: list[float] = field(default_factory=list)
    left_behind: set[str] = field(default_factory=set)

    def take(self, line: str) -> None:
        match json.loads(line):
            case {"kind": "start", "seconds": seconds}:
                self.starts.append(seconds)
            case {"kind": "save", "is_first": is_first, "call_s": call_s, "durable_s": durable_s}:
                (self.first_calls if is_first else self.calls).append(call_s)
                (self.first_durables if is_first else self.durables).append(durable_s)
            case {"kind": "window", **fields}:
                self.stalls.append(fields["with_s"] - fields["without_s"])
                self.holds.append(fields["call_s"] + fields["first_update_s"] - fields["update_s"])
                self.calls.append(fields["call_s"])
                self.window_calls.append(fields["call_s"])
                self.with_save.append(fields["with_steps_s"])
                self.without_save.append(fields["without_steps_s"])
            case {"kind": "memory", "peak_mb": peak_mb, "rest_mb": rest_mb}:
                self.peaks_mb.append(peak_mb)
                self.rests_mb.append(rest_mb)
            case {"kind": "limit", **fields}:
                self.warm_copies.append(fields["warm_copy_s"])
                self.copies.append(fields["copy_s"])
                self.writes.append(fields["write_s"])
                self.durables.append(fields["durable_s"])
                self.commits.append(fields["commit_s"])
                self.num_bytes = fields["num_bytes"]
            case {"kind": "failed", "reason": reason}:
                self.reason = reason

    def stall_by_steps(self) -> float:
        """The call, and what the first, second, … step after it takes longer: the sum of the medians' differences.

        Other work on the machine that hits a few steps of a stretch moves the stretch, and hardly these medians.
        """
        with_s, without_s = (
            sum(statistics.median(step) for step in zip(*stretches, strict=True))
            for stretches in (self.with_save, self.without_save)
        )
        return statistics.median(self.window_calls) + with_s - without_s


def measure(system: str, figures: Figures, turn: int, matmuls: int, root: Path, options: argparse.Namespace) -> None:
    """One system in one round: a process, a folder and a mark of its own, nothing of which stays."""
    mark = f"hf-bench-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as scratch:
        folder, result, log = (Path(scratch) / name for name in ("saves", "result.jsonl", "log.txt"))
        folder.mkdir()
        command = [sys.executable, str(WORKER), system, "--folder", str(folder), "--result", str(result)]
        for name in ("mb", "steps", "pairs", "saves"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--matmuls", str(matmuls), "--turn", str(turn)]
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command, env={**os.environ, MARK: mark}, stdout=output, stderr=subprocess.STDOUT
            ) as worker,
        ):
            try:
                worker.wait(timeout=options.limit_s)
            except subprocess.TimeoutExpired:
                figures.reason = f"no end within {options.limit_s:g} s"
            finally:
                # Of a worker that ended by itself, nothing should be left.
                ended = worker.poll() is not None
                left = end(mark, grace_s=3.0)
                sweep(mark)
        if ended:
            figures.left_behind |= set(left)
        lines = result.read_text().splitlines() if result.exists() else []
        for line in lines:
            figures.take(line)
        if not figures.reason and not (lines and json.loads(lines[-1])["kind"] == "done"):
            figures.reason = f"its process ended with {worker.returncode}"
        if figures.reason and options.logs:
            print(log.read_text(errors="replace"), file=sys.stderr)


def report_limits(limits: Figures) -> None:
    gb = limits.num_bytes / 1e9
    print(row("limit: copy, one thread, warm", [gb / seconds for seconds in limits.warm_copies], unit="GB/s"))
    print(row("limit: O_DIRECT write and fsync", [gb / seconds for seconds in limits.writes], unit="GB/s"))
    print(row("limit: O_DIRECT write and fsync", limits.writes, unit="s"))
    print(row("limit: bare save, copied", limits.copies, unit="s"))
    print(row("limit: bare save, durable", limits.durables, unit="s"))
    print(row("limit: commit of a small file", limits.commits, unit="ms", scale=1000))


def cell(values: list[float], scale: float, digits: int) -> str:
    if not values:
        return NOTHING
    middle, least = statistics.median(values) * scale, min(values) * scale
    return f"{middle:.{digits}f} ({least:.{digits}f})"


def report_table(found: dict[str, Figures]) -> None:
    """Medians (minima); Markdown, so that it can be kept as it is."""
    print("\n   Medians (minima). Call, stall and held in ms, the rest in s and MB.")
    print("   stall: a stretch of steps with one save less the same stretch without, everything included.")
    print("   start: what comes before the first step, imports included.")
    print("   peak, rest: resident memory beyond the training's own, during a save and after it, all processes.")
    print("   by steps: the same from the medians of the first, second, … step of all stretches; less noisy.")
    print("   held: the call and what the next optimizer.step took longer; the least noisy, and only a part of it.\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for system, figures in found.items():
        if figures.reason:
            print(f"| {system} | **not run: {figures.reason}** |")
            continue
        is_saving = system != NO_SAVE
        cells = [
            system,
            cell(figures.calls if is_saving else [], 1000, 2),
            cell(figures.stalls, 1000, 0),
            f"{figures.stall_by_steps() * 1000:.0f}",
            cell(figures.holds, 1000, 1),
            cell(figures.durables if is_saving else [], 1, 3),
            SYSTEMS[system].durability if is_saving else NOTHING,
            cell(figures.first_calls if is_saving else [], 1, 4),
            cell(figures.first_durables if is_saving else [], 1, 3),
            cell(figures.starts if is_saving else [], 1, 2),
            cell(figures.peaks_mb, 1, 0),
            cell(figures.rests_mb, 1, 0),
        ]
        print(f"| {' | '.join(cells)} |")
    print()
    for system, figures in found.items():
        if figures.left_behind:
            names = ", ".join(sorted(figures.left_behind))
            print(f"   {system}: had to be ended after its training: {names}")


def report_goals(found: dict[str, Figures], limits: Figures) -> None:
    """Every goal, met or not, or which figure it lacks."""
    own = found.get(SAFEPOINT, Figures(reason="not chosen"))
    middle = statistics.median

    def goal(
        label: str, peer: str | None, goal: float, value: Callable[[Figures], float], *, at_most: bool, unit: str
    ) -> None:
        other = found.get(peer, Figures(reason="not chosen")) if peer else limits
        for name, figures in ((SAFEPOINT, own), (peer or LIMITS, other)):
            if figures.reason:
                print(f"   {label:<46} no figure: {name} was not run")
                return
        print(verdict(label, value=value(other), goal=goal, at_most=at_most, unit=unit))

    # A stall below the noise counts as the noise: the ratio to a peer above it is then a lower bound.
    idle = found.get(NO_SAVE, Figures(reason="not chosen"))
    noise_s, noise_by_steps_s = (
        (0.0, 0.0) if idle.reason else (middle([abs(stall) for stall in idle.stalls]), abs(idle.stall_by_steps()))
    )
    print(
        f"   noise of the stall, from stretches without any save: {noise_s * 1000:.1f} ms, "
        f"by steps {noise_by_steps_s * 1000:.1f} ms"
    )

    def stall_ratio(peer: Figures) -> float:
        return max(middle(peer.stalls), noise_s) / max(middle(own.stalls), noise_s, 1e-6)

    def steps_ratio(peer: Figures) -> float:
        floor_s = max(noise_by_steps_s, 1e-6)
        return max(peer.stall_by_steps(), floor_s) / max(own.stall_by_steps(), floor_s)

    def held_ratio(peer: Figures) -> float:
        return middle(peer.holds) / max(middle(own.holds), 1e-6)

    goal("call", None, GOAL_CALL_MS, lambda _: middle(own.calls) * 1000, at_most=True, unit="ms")
    for peer, times in GOAL_STALLS.items():
        for kind, ratio in (("stall", stall_ratio), ("stall by steps", steps_ratio), ("held", held_ratio)):
            goal(f"{kind}, {peer}'s over Safepoint's", peer, times, ratio, at_most=False, unit="times")
    goal(
        "first save over later ones, durable",
        None,
        GOAL_FIRST,
        lambda _: middle(own.first_durables) / middle(own.durables),
        at_most=True,
        unit="times",
    )
    goal(
        "durable over the disk's time for the bytes",
        None,
        GOAL_DURABLE,
        lambda limit: middle(own.durables) / middle(limit.writes),
        at_most=True,
        unit="times",
    )
    goal(
        "the same, minima",
        None,
        GOAL_DURABLE,
        lambda limit: min(own.durables) / min(limit.writes),
        at_most=True,
        unit="times",
    )
    for peer, times in GOAL_SOONER.items():
        goal(
            f"sooner durable than {peer}",
            peer,
            times,
            lambda other: middle(other.durables) / middle(own.durables),
            at_most=False,
            unit="times",
        )
    if not own.reason and not limits.reason:
        times_the_limit = middle(own.durables) / middle(limits.durables)
        print(f"   {'ratio to the limit (durable ÷ bare save)':<46} {times_the_limit:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=960, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--step-ms", type=float, default=250, help="forward and backward part of a step")
    parser.add_argument("--steps", type=int, default=8, help="training steps in a stretch, with and without a save")
    parser.add_argument("--pairs", type=int, default=2, help="stretches of both kinds per system and round")
    parser.add_argument("--saves", type=int, default=3, help="saves after the first, with nothing beside them")
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    parser.add_argument("--limit-s", type=float, default=600, help="end a system that takes longer in a round")
    parser.add_argument("--logs", action="store_true", help="print what a system wrote that could not be run")
    options = parser.parse_args()
    print_machine(f"saves of {options.mb} MB beside training")
    matmuls = matmuls_for(options.step_ms)
    print(
        f"   {options.rounds} rounds, {options.pairs} pairs of {options.steps} steps each, forward and backward "
        f"{options.step_ms:g} ms ({matmuls} products), then fused AdamW; one thread"
    )
    found = {system: Figures() for system in options.systems}
    limits = Figures()
    with tempfile.TemporaryDirectory(prefix="hf-bench-", dir=options.folder) as temporary:
        for turn in range(options.rounds):
            first = turn % len(found)
            order = [*found][first:] + [*found][:first]
            measure(LIMITS, limits, turn, matmuls, Path(temporary), options)
            for system in order:
                if not found[system].reason:
                    measure(system, found[system], turn, matmuls, Path(temporary), options)
    for name, figures in {LIMITS: limits, **found}.items():
        if figures.reason:
            print(f"   NOT RUN: {name}: {figures.reason}")
    if not limits.reason:
        report_limits(limits)
    report_table(found)
    report_goals(found, limits)
    print_load("after")


if __name__ == "__main__":
    main()
