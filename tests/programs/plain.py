"""A plain PyTorch loop that saves after every step with a `Checkpointer`, until a step or until it is killed.

`python plain.py FOLDER STEPS`; FOLDER gets one line in `said` when a save has returned, and `final.pt` at the end.
Without saves, as `python plain.py FOLDER STEPS --unsaved`, it is the reference.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from safepoint.snapshot import Checkpointer


def main(folder: Path, steps: int, *, saves: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 512), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(512, 128)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder.mkdir(parents=True, exist_ok=True)
    said = os.open(folder / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    random: dict[str, Any] = {"state": torch.get_rng_state()}
    state = {"model": model, "optimizer": optimizer, "random": random}
    step = 0
    checkpointer = Checkpointer(folder / "checkpoints", keep="newest=3") if saves else None
    if checkpointer is not None:
        step = checkpointer.load(state) or 0
        torch.set_rng_state(random["state"])
        os.write(said, f"began {step}\n".encode())
    while step < steps:
        inputs = torch.randn(16, 128)
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if checkpointer is not None:
            random["state"] = torch.get_rng_state()
            checkpointer.save(state, step)
            os.write(said, f"saved {step}\n".encode())
    if checkpointer is not None:
        checkpointer.close()
    final = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(final, folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), saves="--unsaved" not in sys.argv)
