"""A loop of Accelerate as its own examples have it: loaders that are prepared, an evaluation after each epoch.

With `--plain` its epochs are those of `range`, and nothing knows of Safepoint. Writes `marks-RANK`, a line for each
batch, and at the end `final-RANK.pt` and the evaluations of all epochs, `evaluations.json`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safepoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--by-index", action="store_true", help="accumulate by the number that enumerate counts")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument(
        "--stop", help="break in this epoch: of the batches, or of the epochs", choices=("batches", "epochs")
    )
    parser.add_argument("--fail", action="store_true", help="in the second epoch")
    parser.add_argument("--wrong-loader", action="store_true", help="train on the second loader that was prepared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if options.by_index else options.accumulate)
    rank = accelerator.process_index
    torch.manual_seed(5)
    samples = torch.randn(88, 32)
    train_dataloader = DataLoader(TensorDataset(samples), batch_size=4, shuffle=True)
    eval_dataloader = DataLoader(TensorDataset(samples[:16]), batch_size=8)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    if options.wrong_loader:
        train_dataloader, eval_dataloader = eval_dataloader, train_dataloader
    torch.manual_seed(100 + rank)
    marks = os.open(options.out / f"marks-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    evaluations = options.out / "evaluations.jsonl"
    for epoch in range(options.epochs) if options.plain else safepoint.epochs(options.epochs, accelerator):
        model.train()
        for step, (inputs,) in enumerate(train_dataloader):
            os.write(marks, f"train {epoch}\n".encode())
            time.sleep(options.step_ms / 1000)
            if options.fail and epoch == 1:
                raise ValueError("the script fails on purpose")
            if options.by_index:
                loss = (model(inputs) - inputs).square().mean() / options.accumulate
                accelerator.backward(loss)
                if (step + 1) % options.accumulate == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                with accelerator.accumulate(model):
                    loss = (model(inputs) - inputs).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if options.stop and epoch == 1 and step == 3:
                break
        if options.stop == "epochs" and epoch == 1:
            break
        model.eval()
        losses = []
        for (inputs,) in eval_dataloader:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics((model(inputs) - inputs).square().mean(dim=1)))
        if accelerator.is_main_process:
            with evaluations.open("a") as file:
                file.write(json.dumps([epoch, float(torch.cat(losses).mean())]) + "\n")
    state = {
        "model": accelerator.unwrap_model(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, options.out / f"final-{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
