"""How fast `safepoint plan simulate` simulates: a year of 16,384 ranks, and interruptions a second.

The year is simulated with as many trials as its confidence interval needs. Events are interruptions, ends of restarts
and saves; between two interruptions, saves are counted in closed form, so that their number costs nothing.

Peer: the same job with every save as an event of its own, in a heap, as a general simulation library would. Limit:
drawing the interruptions alone.
"""

import argparse
import heapq
import random
import time
from collections.abc import Callable

from figures import print_load, print_machine, verdict

from safepoint.planning.commit_costs import Platform
from safepoint.planning.failures import DAY_S, MODELS, between_s
from safepoint.planning.policies import POLICIES, plan_of
from safepoint.planning.simulation import simulate

RANKS = 16_384
YEAR_S = 365 * DAY_S
GOAL_S = 10.0


def with_a_heap(interval_s: float, stall_s: float, restart_s: float, mean_s: float, duration_s: float) -> int:
    """The number of events of a job whose machine is lost at random; every save is pushed and popped."""
    generator = random.Random(1)
    queue = [(generator.expovariate(1 / mean_s), "interruption"), (interval_s, "save")]
    heapq.heapify(queue)
    count = 0
    while True:
        at_s, kind = heapq.heappop(queue)
        if at_s > duration_s:
            return count
        count += 1
        if kind == "save":
            heapq.heappush(queue, (at_s + stall_s + interval_s, "save"))
        else:
            queue = [(at_s + generator.expovariate(1 / mean_s), "interruption"), (at_s + restart_s, "restart")]
            heapq.heapify(queue)
        if kind == "restart":
            heapq.heappush(queue, (at_s + interval_s, "save"))


def draw() -> int:
    """Draw as many interruptions as it returns."""
    generator = random.Random(1)
    for _ in range(200_000):
        generator.expovariate(1.0)
        generator.random()
    return 200_000


def timed(function: Callable[[], int]) -> tuple[float, int]:
    """Seconds on the clock, and what the function returned."""
    began_s = time.perf_counter()
    returned = function()
    return time.perf_counter() - began_s, returned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="the shortest time counts")
    arguments = parser.parse_args()
    print_machine("Simulation of a year of 16,384 ranks, failures as measured by Meta on RSC-1")
    hazards = MODELS["meta-rsc1"].hazards(RANKS // 8)
    for name, policy in POLICIES.items():
        plan = plan_of(policy, Platform(), RANKS, hazards)
        times: list[float] = []
        for _ in range(arguments.rounds):
            began_s = time.perf_counter()
            simulated = simulate(plan, hazards, duration_s=YEAR_S, num_trials=arguments.trials, seed=1)
            times.append(time.perf_counter() - began_s)
        took_s = min(times)
        print(
            f"   {name:<20} {took_s:6.3f} s   {simulated.num_interruptions / took_s / 1e6:5.2f} M interruptions/s   "
            f"{simulated.num_events / took_s / 1e6:7.1f} M events/s   "
            f"ETTR {100 * simulated.ettr.mean:.2f} ± {100 * simulated.ettr.half_width:.2f} %"
        )
        print(verdict("", value=took_s, goal=GOAL_S, at_most=True, unit="s"))
    plan = plan_of(POLICIES["safepoint"], Platform(), RANKS, hazards)
    restart_s = plan.machine_restart_s + plan.load_s
    took_s, count = min(
        timed(lambda: with_a_heap(plan.interval_s, plan.stall_s, restart_s, between_s(hazards), YEAR_S / 12))
        for _ in range(arguments.rounds)
    )
    print(f"   peer, every save an event: one month in {took_s:.3f} s   {count / took_s / 1e6:.2f} M events/s")
    took_s, count = min(timed(draw) for _ in range(arguments.rounds))
    print(f"   limit, drawing the interruptions: {count / took_s / 1e6:.2f} M/s")
    print_load("after")


if __name__ == "__main__":
    main()
