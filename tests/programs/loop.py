"""A hand-written loop in a session: dropout, shuffling, two batches a step, a scheduler; DDP when there are ranks.

Writes `marks-RANK` (a line for each step that begins) into the output folder, and `final-RANK.pt` at the end.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import safepoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=30)
    parser.add_argument("--resumed-step-ms", type=float, help="as soon as the run goes on from a checkpoint")
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--wait-at", type=int, help="in the middle of this step, rank 0 waits until OUT/go exists")
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--device", default="cpu", help="all ranks share it")
    parser.add_argument("--lora", action="store_true", help="train PEFT's adapters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = None
    if options.accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
    elif world_size > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 32))
    sampler = DistributedSampler(data, seed=2) if world_size > 1 and accelerator is None else None
    loader = DataLoader(data, batch_size=8 // world_size, sampler=sampler, shuffle=sampler is None)
    plain = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 32))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        plain = get_peft_model(plain, LoraConfig(r=2, target_modules=["0", "4"]))
    plain.to(options.device)
    model = DistributedDataParallel(plain) if world_size > 1 and accelerator is None else plain
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=18)
    torch.manual_seed(100 + rank)
    options.out.mkdir(parents=True, exist_ok=True)
    marks = os.open(options.out / f"marks-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if accelerator is not None:
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        parts = {"accelerator": accelerator}
    with safepoint.session(**parts, data=loader, output_dir=options.out, save_steps=options.save_steps) as run:
        is_slow = options.resumed_step_ms is None or run.step_number == 0
        step_ms = options.step_ms if is_slow else options.resumed_step_ms
        for batches in run.epochs(options.epochs):
            for number, (inputs,) in enumerate(batches):
                if number % 2 == 0:
                    os.write(marks, f"train {run.step_number}\n".encode())
                while run.step_number == options.wait_at and rank == 0 and not (options.out / "go").exists():
                    time.sleep(0.05)
                time.sleep(step_ms / 2000)
                inputs = inputs.to(options.device)  # noqa: PLW2901
                loss = (model(inputs) - inputs).square().mean() / 2
                loss.backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    run.step(loss=loss)
    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "random": torch.get_rng_state()}, options.out / f"final-{rank}.pt")
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
