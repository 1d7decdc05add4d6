"""Classifies handwritten digits with a loop of plain PyTorch that can be interrupted and resumed.

    python examples/digits.py            # interrupt it with Ctrl-C or kill it; the same command resumes
    safepoint run examples/digits.py     # also restarts it when it crashes

The images are scikit-learn's: 1797 scans of eight by eight pixels. Only the lines with `run` are for Safepoint.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safepoint


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * len(loader))

    with safepoint.session(
        model=model, optimizer=optimizer, scheduler=scheduler, data=loader, output_dir="digits-output", save_steps=30
    ) as run:
        for image, label in run.batches(epochs=10):
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step(loss=loss)

    model.eval()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"{right:.1%} of the 297 digits that it had not seen are read rightly")


if __name__ == "__main__":
    main()
