"""Trains on a CUDA device, and writes a line for each step: no framework helps it to save anything.

    cuda_training.py OUT STEPS [--mb N] [--pause-s S] [--kernel-s S] [--nccl]

The last line has the digest of the weights. `--mb` is memory of the device that is used besides; its sum is in the
last line, too. With `--kernel-s`, each step waits for a kernel that runs for so long. With `--nccl`, the gradients go
through NCCL, in a world of one process.
"""

import argparse
import hashlib
import os
import sys
import time

import torch


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--mb", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--kernel-s", type=float, default=0.0)
    parser.add_argument("--nccl", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(2048, 256)
    )
    model.to("cuda")
    ballast = torch.randint(0, 1 << 30, (options.mb << 18,), dtype=torch.int32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.nccl:
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    with open(options.out, "a", buffering=1) as file:
        for step in range(options.steps):
            x = torch.randn(64, 256, device="cuda")
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if options.nccl:
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            if options.kernel_s:
                torch.cuda._sleep(int(options.kernel_s * 1.5e9))
                torch.cuda.synchronize()
            file.write(f"{step} {loss.item():.17g}\n")
            time.sleep(options.pause_s)
        weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
        file.write(f"end {hashlib.sha256(weights).hexdigest()} {ballast.sum(dtype=torch.int64).item()}\n")
    if options.nccl:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
