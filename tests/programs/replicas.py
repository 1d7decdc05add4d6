"""A hand-written loop in a session under DDP, whose checkpoints are large enough to be copied by several ranks.

Its ranks can be made to differ. `marks-RANK` in the output folder gets a line for each step that begins, and
`final-RANK.pt` is there at the end.
"""

import argparse
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import safepoint
from safepoint.snapshot.staging.stager import Stager, Work

WIDTH = 512


def hang_in_copy(step: int, flag: Path, stepped: "list[int]") -> None:
    """From the snapshot of this step on, the first copy into another rank's block does not end."""
    copy = Stager._copy

    def hanging(stager: Stager, work: Work, index: int) -> None:
        if stepped[0] >= step and work.windows and work.copies[index][0] in work.windows:
            flag.touch()
            threading.Event().wait()
        copy(stager, work, index)

    Stager._copy = hanging  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--save-steps", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="no DDP: each rank trains by itself")
    parser.add_argument("--order", default="", choices=("", "reversed", "swapped"), help="of the last optimizer")
    parser.add_argument("--drift", type=int, default=0, help="in this step the last rank becomes another one")
    parser.add_argument("--signal", type=int, default=0, help="in this step the last rank gets SIGTERM")
    parser.add_argument("--hang", type=int, default=0, help="from this step on the last rank's copies do not end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    is_last = rank == world_size - 1
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(24 * world_size, WIDTH))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=2))
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)]
    plain = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH + 1))
    model: nn.Module = plain if options.alone else DistributedDataParallel(plain)
    parameters = list(plain.parameters())
    if options.order == "reversed" and is_last:
        parameters.reverse()
    if options.order == "swapped" and is_last:  # two of one shape
        parameters[0], parameters[4] = parameters[4], parameters[0]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    numpy.random.seed(rank)
    options.out.mkdir(parents=True, exist_ok=True)
    marks = os.open(options.out / f"marks-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    now, stepped = [0], [0]
    flag = options.out / "hangs"
    if options.hang and is_last and not flag.exists():
        hang_in_copy(options.hang, flag, stepped)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with safepoint.session(**parts, data=loader, output_dir=options.out, save_steps=options.save_steps) as run:
        for (inputs,) in run.batches(options.epochs):
            now[0] = run.step_number + 1
            os.write(marks, f"train {run.step_number}\n".encode())
            if now[0] == options.signal and is_last:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(options.step_ms / 1000)
            model(inputs).square().mean().backward()
            optimizer.step()
            stepped[0] = now[0]  # not sooner: until here the snapshot before may still be copied
            optimizer.zero_grad()
            if now[0] == options.drift and is_last:
                optimizer.state[parameters[-2]]["exp_avg"][-1, -1] += 1
            run.step()
    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, options.out / f"final-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
