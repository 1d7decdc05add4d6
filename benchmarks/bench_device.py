"""Snapshots of a CUDA model: how long training is held up, and how fast the copy is against the device's link.

Steps of matrix products and a real AdamW, in turns with and without one save in a stretch. The host is not waited
for by either; a stretch ends when the device is done. The peer is `tensor.to("cpu")` of every tensor at the boundary,
which is what `torch.save` begins with. The limit is one copy of as many bytes into pinned memory.

Goals: the call returns within 5 ms; a stretch with a save is at most a hundredth of the peer's pause longer; the copy
reaches 0.9 of the limit's speed. Without a CUDA device it says so and ends.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import print_load, print_machine, row, verdict

from safepoint.snapshot import Checkpointer

GOAL_CALL_MS, GOAL_STALL, GOAL_SPEED = 5, 0.01, 0.9
WIDTH = 2048


class Training:
    """A stack of square layers on the device; steps take as many products as asked for."""

    def __init__(self, state_mb: int, num_products: int) -> None:
        num_layers = max(1, state_mb * 1_000_000 // (12 * WIDTH * WIDTH))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(num_layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        self.optimizer.step()
        self._num_products = num_products
        self._left, self._right = (torch.randn(4096, 4096, device="cuda") for _ in range(2))

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def step(self) -> None:
        for _ in range(self._num_products):
            torch.mm(self._left, self._right)
        self.optimizer.step()

    def stretch_s(self, num_steps: int) -> float:
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started_s


def pinned_copy_s(num_bytes: int) -> float:
    """The bytes, at most 2 GB at a time, from the device into memory that torch itself has pinned."""
    size = min(num_bytes, 2_000_000_000)
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8).pin_memory()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds) * num_bytes / size


def measure(options: argparse.Namespace, folder: Path) -> None:
    training = Training(options.mb, options.products)
    num_bytes = training.num_bytes()
    state = {"model": training.model, "optimizer": training.optimizer}
    limit_s = pinned_copy_s(num_bytes)
    peers, calls, copies, stalls, durables = ([] for _ in range(5))
    with Checkpointer(folder, keep="newest=1") as checkpointer:
        checkpointer.prepare(state, is_waiting=True)
        checkpointer.save(state, 1).wait()
        for number in range(options.rounds):
            without_s = training.stretch_s(options.steps)
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            saving = checkpointer.save(state, 2 * number + 2)
            called_s = time.perf_counter()
            stretch_s = training.stretch_s(options.steps)
            saving.wait()
            durables.append(time.perf_counter() - started_s)
            calls.append(called_s - started_s)
            stalls.append(stretch_s + calls[-1] - without_s)
            started_s = time.perf_counter()
            saving = checkpointer.save(state, 2 * number + 3)  # nothing beside it
            saving.wait_staged()
            copies.append(time.perf_counter() - started_s)
            saving.wait()
            started_s = time.perf_counter()
            for tensor in training.tensors():
                tensor.to("cpu")
            peers.append(time.perf_counter() - started_s)
    gigabytes = num_bytes / 1e9
    print(f"   {gigabytes:.2f} GB in {len(training.tensors())} tensors on {torch.cuda.get_device_name()}")
    print(row("call", calls, unit="ms", scale=1000))
    print(row("stall of a stretch with a save", stalls, unit="ms", scale=1000))
    print(row("peer: tensors to the host at the boundary", peers, unit="ms", scale=1000))
    print(row("copy, nothing beside it", [gigabytes / seconds for seconds in copies], unit="GB/s"))
    print(row("limit: one copy into pinned memory", [gigabytes / limit_s], unit="GB/s"))
    print(row("durable", durables, unit="s"))
    middle = statistics.median
    print(verdict("call", value=middle(calls) * 1000, goal=GOAL_CALL_MS, at_most=True, unit="ms"))
    stall = max(0.0, middle(stalls)) / middle(peers)
    print(verdict("stall over the peer's pause", value=stall, goal=GOAL_STALL, at_most=True, unit="times"))
    speed = limit_s / middle(copies)
    print(verdict("speed of the copy over the limit", value=speed, goal=GOAL_SPEED, at_most=False, unit="times"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=6000, help="of model and optimizer, and of host memory")
    parser.add_argument("--products", type=int, default=100, help="of 4096² matrices in a step")
    parser.add_argument("--steps", type=int, default=8, help="in a stretch, with and without a save")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    print_machine("snapshots of a CUDA model")
    if not torch.cuda.is_available():
        print("   NOT RUN: this machine has no CUDA device")
        sys.exit(0)
    with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
        measure(options, Path(temporary))
    print_load("after")


if __name__ == "__main__":
    main()
