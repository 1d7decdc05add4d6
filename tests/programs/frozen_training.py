"""Trains a model, with or without adapters, and writes a line for each step: no framework helps it to save anything.

    frozen_training.py OUT STEPS [lora] [PAUSE_S]

The last line has the digest of the weights. The program pauses after each step, until there is a file OUT.fast. Under
a launcher of torch, the ranks train together, with DDP over gloo, and the first one writes.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed


def make_model(is_lora: bool) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    """A model, and what is trained of it: everything, or two small matrices beside frozen weights of 96 MB."""
    if not is_lora:
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
        return model, list(model.parameters())
    base = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    base.requires_grad_(False)
    down, up = torch.nn.Linear(1024, 4, bias=False), torch.nn.Linear(4, 1024, bias=False)

    class Adapted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return base(x) + up(down(x))

    return Adapted(), [*down.parameters(), *up.parameters()]


def main() -> None:
    out, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    is_lora = "lora" in sys.argv[3:]
    pause_s = next((float(word) for word in sys.argv[3:] if word != "lora"), 0.0)
    model, trained = make_model(is_lora)
    width = 1024 if is_lora else 64
    is_writing = True
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        is_writing = torch.distributed.get_rank() == 0
        torch.manual_seed(1 + torch.distributed.get_rank())
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    with open(out if is_writing else os.devnull, "a", buffering=1) as file:
        for step in range(steps):
            x = torch.randn(8, width)
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(f"{step} {loss.item():.17g}\n")
            if pause_s and not os.path.exists(f"{out}.fast"):
                time.sleep(pause_s)
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in trained)).hexdigest()
        file.write(f"end {digest}\n")


if __name__ == "__main__":
    main()
