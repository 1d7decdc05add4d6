"""Two sessions in one script, one after the other, each with as many steps and an output folder of its own."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import safepoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for fold in range(2):
        torch.manual_seed(fold)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8)
        with safepoint.session(
            model=model, optimizer=optimizer, data=loader, output_dir=options.out / str(fold)
        ) as run:
            for (inputs,) in run.batches(epochs=1):
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss)


if __name__ == "__main__":
    main()
