"""A hand-written loop in a session, its model sharded by `fully_shard` or in DDP, on any number of ranks.

The global batch is 24, whatever that number is. Writes a line `STEP SAMPLE…` for each step to `seen-RANK`, and the
whole state when a run begins to `begun-STEP.pt`, after each step to `ended-STEP.pt`. With `--lora` PEFT's adapters
are trained, on a base that `--base-seed` makes.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import safepoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--base-seed", type=int, default=5)
    parser.add_argument("--width", type=int, default=36)
    parser.add_argument("--unused", action="store_true", help="the model has a weight that nothing uses")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(options.base_seed)
    data = TensorDataset(torch.randn(240, 16), torch.arange(240))
    loader = DataLoader(data, batch_size=24 // world_size, sampler=DistributedSampler(data, seed=2))
    layers = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 16))
    if options.unused:
        layers.register_parameter("unused", nn.Parameter(torch.ones(8)))
    model: nn.Module = layers
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(layers, LoraConfig(r=2, lora_dropout=0.1, target_modules=["0", "2"]))
    if options.kind == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    options.out.mkdir(parents=True, exist_ok=True)
    seen = os.open(options.out / f"seen-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    marks = os.open(options.out / f"marks-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def whole_state() -> dict[str, object]:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(model, optimizer, options=whole)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with safepoint.session(**parts, data=loader, output_dir=options.out) as run:
        begun = whole_state()
        if rank == 0:
            torch.save(begun, options.out / f"begun-{run.step_number}.pt")
        for inputs, numbers in run.batches(epochs=2):
            os.write(marks, f"train {run.step_number}\n".encode())
            time.sleep(options.step_ms / 1000)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            os.write(seen, f"{run.step_number} {' '.join(map(str, numbers.tolist()))}\n".encode())
            if rank == 0 or options.kind == "fsdp":
                state = whole_state()
                if rank == 0:
                    torch.save(state, options.out / f"ended-{run.step_number + 1}.pt")
            run.step(loss=loss)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
