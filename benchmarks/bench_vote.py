"""Measures what the vote costs an optimizer step: two real ranks over gloo, all variants interleaved in one run.

Each step is a forward and backward part, an all-reduce as for gradients, and an optimizer part. The variants:

- none: no vote;
- safepoint: as the Trainer's run does it, which begins the vote with the step while steps are short;
- beside the optimizer: as it does when steps are long, when a signal is to be heard in the step in which it came;
- awaited when the step ends: what a plain `all_reduce` in the loop costs (the peer).

The primary figure is the time that the main thread spends inside the vote's calls, of the slower rank of each
step: as time on the clock, which holds the wait for the other rank too (without a vote that wait comes a moment
later, in the next gradient all-reduce), and as processor time, which other work on the machine hardly changes.
The difference of whole steps is printed as well, and is no better than the machine is quiet. The machine's limit
is a bare all-reduce of as many bytes, awaited.
"""

import argparse
import os
import random
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from figures import print_load, print_machine, row, verdict

from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import NUM_VALUES, Peers
from safepoint.training.context.termination import Termination
from safepoint.training.engine.agreement import Agreement

NUM_RANKS = 2
GRADIENTS = 16 * 1024
VARIANTS = {
    "none": "no vote",
    "safepoint": "safepoint's vote",
    "beside": "vote beside the optimizer",
    "waiting": "vote awaited when the step ends",
}
VOTING = tuple(VARIANTS)[1:]
GOAL_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step on one rank; `*_cpu_s` are the main thread's processor time."""

    variant: str
    block: int
    whole_s: float
    start_s: float
    start_cpu_s: float
    collect_s: float
    collect_cpu_s: float

    @property
    def vote_s(self) -> float:
        return self.start_s + self.collect_s

    @property
    def vote_cpu_s(self) -> float:
        return self.start_cpu_s + self.collect_cpu_s


class BesideOptimizer(Agreement):
    """Votes as if steps were long."""

    @property
    def _votes_with_step(self) -> bool:
        return False


def busy_for(matrix: torch.Tensor, num_products: int) -> None:
    for _ in range(num_products):
        torch.mm(matrix, matrix)


def calibrate(matrix: torch.Tensor, seconds: float) -> int:
    """How many products take `seconds`: the fastest of several tries."""
    tries = []
    for _ in range(7):
        started_s = time.perf_counter()
        busy_for(matrix, 20)
        tries.append(time.perf_counter() - started_s)
    return max(1, round(seconds / (min(tries) / 20)))


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and seconds of this thread's processor time."""
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - started_s, time.thread_time() - started_cpu_s


def run_step(variant: str, block: int, number: int, agreements: dict[str, Agreement], work: Any) -> Step:
    started_s = time.perf_counter()
    begin = start = end = (0.0, 0.0)
    agreement = agreements.get(variant)
    if agreement is not None:
        agreement.boundary_ends()  # other variants' steps have passed since its last one
        begin = timed(lambda: agreement.step_begins(number))
    work.forward_backward()
    dist.all_reduce(work.gradients)
    if agreement is not None:
        start = timed(lambda: agreement.gradients_complete(number))
    work.optimizer()
    if agreement is not None:
        end = timed(agreement.step_ends)
    elif variant == "waiting":
        end = timed(lambda: agreements["beside"].vote_now(number))
    whole_s = time.perf_counter() - started_s
    return Step(variant, block, whole_s, begin[0] + start[0], begin[1] + start[1], *end)


def rank_main(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    peers = Peers(Place(rank=rank, world_size=NUM_RANKS, local_rank=rank), timeout_s=120)
    termination = Termination(within_s=30)
    agreements = {"safepoint": Agreement(termination, peers), "beside": BesideOptimizer(termination, peers)}
    matrix = torch.rand(96, 96)
    num_backward = calibrate(matrix, options.backward_ms / 1000)
    num_optimizer = calibrate(matrix, options.optimizer_ms / 1000)
    work = SimpleNamespace(
        gradients=torch.zeros(GRADIENTS),
        forward_backward=(
            (lambda: time.sleep(options.backward_ms / 1000))
            if options.work == "sleep"
            else (lambda: busy_for(matrix, num_backward))
        ),
        optimizer=lambda: busy_for(matrix, num_optimizer),
    )
    order = random.Random(options.seed)  # the same on all ranks
    steps: list[Step] = []
    bare: list[tuple[float, float]] = []
    values = torch.zeros(NUM_VALUES, dtype=torch.int64)
    number = 0
    for block in range(options.blocks + 1):
        variants = list(VARIANTS)
        order.shuffle(variants)
        for variant in variants:
            dist.barrier()
            for _ in range(options.steps):
                number += 1
                steps.append(run_step(variant, block, number, agreements, work))
        dist.barrier()
        bare += [timed(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX)) for _ in range(20)]
    gathered = peers.gather((steps, bare))
    if rank == 0:
        report(gathered, options)
    dist.barrier()
    os._exit(0) if rank else dist.destroy_process_group()


def report(gathered: list[tuple[list[Step], list[tuple[float, float]]]], options: argparse.Namespace) -> None:
    of_ranks = [[step for step in steps if step.block > 0] for steps, _ in gathered]  # block 0 warms up
    steps_of: dict[str, list[tuple[Step, ...]]] = defaultdict(list)
    for same_step in zip(*of_ranks, strict=True):
        steps_of[same_step[0].variant].append(same_step)

    def slower(variant: str, figure: str) -> list[float]:
        return [max(getattr(step, figure) for step in same_step) for same_step in steps_of[variant]]

    bare_s = [max(pair)[0] for pair in zip(*(bare for _, bare in gathered), strict=True)][20:]
    for suffix, what in (("s", "time on the clock"), ("cpu_s", "processor time of the main thread")):
        print(f"   {what} inside the vote's calls, slower rank of each step")
        for variant in VOTING:
            print(row(VARIANTS[variant], slower(variant, f"vote_{suffix}"), unit="µs", scale=1e6))
            for part in ("start", "collect") if variant != "waiting" else ():
                print(row(f"  of it {part}", slower(variant, f"{part}_{suffix}"), unit="µs", scale=1e6))
    print(row("limit: bare 72-byte all-reduce, awaited", bare_s, unit="µs", scale=1e6))
    growth_s = print_whole_steps(steps_of)
    ours_s, waiting_s = (statistics.median(slower(variant, "vote_s")) for variant in ("safepoint", "waiting"))
    print(f"   {'ratio to the peer (waiting ÷ safepoint)':<46} {waiting_s / ours_s:.2f}")
    print(f"   {'ratio to the limit (safepoint ÷ bare)':<46} {ours_s / statistics.median(bare_s):.2f}")
    in_calls = statistics.median(slower("safepoint", "vote_s"))
    for share_s, what in ((growth_s, "growth of the step"), (in_calls, "time in the vote's calls")):
        label = f"share of a {options.step_ms:g} ms step, {what}"
        value = 100 * share_s / (options.step_ms / 1000)
        print(verdict(label, value=value, goal=100 * GOAL_SHARE, at_most=True, unit="%"))


def print_whole_steps(steps_of: dict[str, list[tuple[Step, ...]]]) -> float:
    """Seconds by which a step with Safepoint's vote is longer, median over the rounds."""
    print("   whole steps, slower rank")
    of_block: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for variant, text in VARIANTS.items():
        whole_s = [max(step.whole_s for step in same_step) for same_step in steps_of[variant]]
        for same_step, seconds in zip(steps_of[variant], whole_s, strict=True):
            of_block[variant][same_step[0].block].append(seconds)
        print(row(text, whole_s, unit="ms", scale=1e3))
    growth_s: dict[str, float] = {}
    for variant in VOTING:
        differences = [
            statistics.median(seconds) - statistics.median(of_block["none"][block])
            for block, seconds in of_block[variant].items()
        ]
        growth_s[variant] = statistics.median(differences)
        print(row(f"{VARIANTS[variant]}, minus none", differences, unit="µs", scale=1e6))
    return growth_s["safepoint"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25, help="rounds over all variants")
    parser.add_argument("--steps", type=int, default=8, help="steps of one variant in a round")
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--optimizer-ms", type=float, default=2, help="of the step, after the vote has begun")
    parser.add_argument("--work", choices=("sleep", "busy"), default="sleep", help="forward and backward")
    parser.add_argument("--seed", type=int, default=1, help="order of the variants")
    options = parser.parse_args()
    options.backward_ms = options.step_ms - options.optimizer_ms
    print_machine("cost of the vote per optimizer step")
    print(
        f"   {NUM_RANKS} ranks over gloo, {options.blocks} rounds of {options.steps} steps, {options.work} "
        f"{options.backward_ms:g} ms + optimizer {options.optimizer_ms:g} ms, seed {options.seed}"
    )
    mp.spawn(rank_main, args=(free_port(), options), nprocs=NUM_RANKS)
    print_load("after")


if __name__ == "__main__":
    main()
