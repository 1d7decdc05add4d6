"""Ranks of `bench_strategies.py` that hold the same AdamW state and copy snapshots of it, alone or together.

Each rank is a process, on its own CUDA device where there are enough of them. A snapshot begins and the optimizer
steps at once, as if forward and backward took no time. The first rank measures. Nothing is written.
"""

import multiprocessing
import socket
import time
from typing import Any

import torch

from safepoint.snapshot.images.module_state import OptimizerState
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.channel import Channel
from safepoint.snapshot.replicas.team import Team
from safepoint.snapshot.replicas.team_helper import Helper
from safepoint.snapshot.replicas.team_lead import Lead
from safepoint.snapshot.staging.device_copy import pin
from safepoint.snapshot.staging.guard import Guard
from safepoint.snapshot.staging.stager import Placed, Stager, Work

NOTHING, ALONE, TOGETHER = "no snapshot", "the first alone", "together"
NUM_REHEARSED = 4
_NUM_VALUES = 1 << 20
_TIMEOUT_S = 300


class Replica:
    """One rank's model and optimizer, and the means to copy them.

    Args:
        rank: of the node.
        state_mb: of parameters and moments.
        team: see `snapshot.team`.
    """

    def __init__(self, rank: int, state_mb: int, team: Team) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.device = torch.device(f"cuda:{rank}" if torch.cuda.device_count() > rank else "cpu")
        count = max(1, round(state_mb * 1e6 / 12 / _NUM_VALUES))
        self.parameters = [torch.randn(_NUM_VALUES).to(self.device).requires_grad_() for _ in range(count)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self._team = team
        self._stager = Stager(lambda _, __: None)
        self._guard = Guard(self._stager.before_step, [self.optimizer])
        self._images = TorchImages("state.pt")
        self._state = OptimizerState(self.optimizer)
        self._block: Block | None = None
        self._is_lead = rank == 0

    def _placed(self) -> list[Placed]:
        if not self._is_lead:
            return []
        parameters = [parameter.detach() for parameter in self.parameters]
        image = self._images.compose({"parameters": parameters, "optimizer": self._state.state_dict()})
        if self._block is None:
            self._block = Block.allocate(1, image.size_bytes)
            self._block.populate()
            if self.device.index is not None:
                pin(self._block, self.device.index)
        return [Placed(image=image, block=self._block, offset=0)]

    def step(self, how: str, number: int) -> tuple[float, float]:
        """Seconds until the step behind a boundary was done, and until the snapshot was whole."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began_s = time.perf_counter()
        problems: list[bool] = []
        if how == TOGETHER:
            arranged = self._team.arrange(number, self._placed(), self._guard)

            def end(is_whole: bool) -> None:
                ending = self._team.ended(number, self._stager.sums if is_whole else None)
                problems.append(not ending.is_whole)

            self._stager.stage(Work(**arranged._asdict(), on_begin=lambda: None, on_end=end), self._guard)
            self._team.begun(number)
        elif how == ALONE:
            work = Work(placed=self._placed(), on_begin=lambda: None, on_end=lambda ok: problems.append(not ok))
            self._stager.stage(work, self._guard)
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stepped_s = time.perf_counter() - began_s
        self._stager.wait()
        if any(problems):
            raise SystemExit("a snapshot was not whole")
        return stepped_s, time.perf_counter() - began_s


def _help(rank: int, state_mb: int, to_lead: socket.socket, orders: socket.socket) -> None:
    replica = Replica(rank, state_mb, Helper(Channel(to_lead), timeout_s=_TIMEOUT_S))
    orders.sendall(b"r")
    while (order := orders.makefile("r").readline().split(",")) != [""]:
        replica.step(order[0], int(order[1]))
        orders.sendall(b"r")


def measure(num_ranks: int, state_mb: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(Seconds of the step, seconds until the snapshot was whole) by way, on the first rank."""
    spawning: Any = multiprocessing.get_context("spawn")
    links = [(socket.socketpair(), socket.socketpair()) for _ in range(num_ranks - 1)]
    helpers = [
        spawning.Process(target=_help, args=[rank, state_mb, link[1], orders[1]], daemon=True)
        for rank, (link, orders) in enumerate(links, start=1)
    ]
    for helper in helpers:
        helper.start()
    channels = {rank: Channel(link[0]) for rank, (link, _) in enumerate(links, start=1)}
    replica = Replica(0, state_mb, Lead(channels, least_bytes=0))
    found: dict[str, list[tuple[float, float]]] = {NOTHING: [], ALONE: [], TOGETHER: []}
    ways = [TOGETHER] * NUM_REHEARSED + list(found) * rounds
    for number, how in enumerate(ways, start=1):
        for _, orders in links:
            orders[0].recv(1)
        for _, orders in links:
            orders[0].sendall(f"{how},{number}\n".encode())
        took = replica.step(how, number)
        if number > NUM_REHEARSED:
            found[how].append(took)
        else:
            time.sleep(0.5)  # helpers map their part beside what follows
    for helper in helpers:
        helper.terminate()
        helper.join()
    return found
