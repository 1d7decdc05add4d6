"""What the vote costs an optimizer step of 50 ms, on two real ranks over gloo.

Interleaved in one run: steps without a vote, with the vote as the Trainer integration does it (begun before the
optimizer, heard when the step ends), begun at the step's beginning, and taken synchronously at its end. Printed
beside them: the time the main thread spends in the vote, and the bare latency of a 64-byte all-reduce, which is the
limit. Goal: 0.5 % of the step.
"""

import argparse
import datetime
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.foundation.environment import Place
from holdfast.training.peers import Peers
from holdfast.training.vote import Ballot, Vote

STEP_S, OPTIMIZER_S = 0.050, 0.002
WAYS = ("none", "before the optimizer", "at the step's beginning", "synchronous")


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.ones(64) * 2


def one_step(way: str, vote: Vote, step: int, barrier: torch.Tensor) -> tuple[float, float]:
    """Seconds of the step, and of them in the vote's calls on the main thread."""
    begun = time.perf_counter()
    in_vote = 0.0

    def call(action) -> None:
        nonlocal in_vote
        start = time.perf_counter()
        action()
        in_vote += time.perf_counter() - start

    if way == "at the step's beginning":
        call(lambda: vote.start(Ballot(), step=step))
    time.sleep(STEP_S - OPTIMIZER_S)
    dist.all_reduce(barrier)  # gradients: ranks meet here in every data-parallel step
    if way == "before the optimizer":
        call(lambda: vote.start(Ballot(), step=step))
    busy(OPTIMIZER_S)
    if way == "synchronous":
        call(lambda: vote.take(Ballot(), step=step))
    elif way != "none":
        call(vote.collect)
    return time.perf_counter() - begun, in_vote


def rank_main(rank: int, port: int, rounds: int, steps: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    peers = Peers(Place(rank=rank, world_size=2, local_rank=rank), timeout_s=60)
    vote, barrier = Vote(peers), torch.zeros(1024)
    totals: dict[str, list[float]] = {way: [] for way in WAYS}
    calls: dict[str, list[float]] = {way: [] for way in WAYS}
    bare: list[float] = []
    step = 0
    for _ in range(rounds):
        for way in WAYS:
            for _ in range(steps):
                step += 1
                total, in_vote = one_step(way, vote, step, barrier)
                totals[way].append(total)
                calls[way].append(in_vote)
        for _ in range(steps):
            start = time.perf_counter()
            peers.start_maximum([0] * 8).wait()
            bare.append(time.perf_counter() - start)
    if rank == 0:
        report(totals, calls, bare)
    dist.barrier()
    os._exit(0)


def report(totals: dict[str, list[float]], calls: dict[str, list[float]], bare: list[float]) -> None:
    without = statistics.median(totals["none"])
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {len(bare)} steps each")
    print(f"a step without a vote: {without * 1e3:.2f} ms")
    print(f"{'vote':<26}{'in its calls, median':>22}{'min':>9}{'share of 50 ms':>16}{'step difference':>17}")
    for way in WAYS[1:]:
        median = statistics.median(calls[way])
        difference = statistics.median(totals[way]) - without
        print(
            f"{way:<26}{median * 1e6:>19.0f} µs{min(calls[way]) * 1e6:>6.0f} µs"
            f"{median / STEP_S:>15.2%}{difference * 1e6:>14.0f} µs"
        )
    print(
        f"limit: bare 64-byte all-reduce, median {statistics.median(bare) * 1e6:.0f} µs, min {min(bare) * 1e6:.0f} µs"
    )
    share = statistics.median(calls["before the optimizer"]) / STEP_S
    print(f"goal 0.50 %: {'reached' if share <= 0.005 else 'missed'} with {share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(
        rank_main, args=(port, options.rounds, options.steps), nprocs=2, start_method="spawn", join=True
    )


if __name__ == "__main__":
    main()
