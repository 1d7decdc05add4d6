"""What goes wrong in hand-written loops: each mistake in a session of its own; says how it was refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import safepoint
from safepoint.errors import SafepointError

ROOT = Path(sys.argv[1])


def session(name: str, *, width: int = 4, data: Any = range(3)) -> Any:
    model = torch.nn.Linear(width, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return safepoint.session(model=model, optimizer=optimizer, data=data, output_dir=ROOT / name)


def train(run: Any) -> None:
    with run:
        for _ in run.batches():
            run.step(loss=0.0)


def forget() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with safepoint.session(model=model, optimizer=optimizer, data=range(3), output_dir=ROOT / "forgotten") as run:
        for _ in run.batches(epochs=2):
            model(torch.ones(4)).backward()
            optimizer.step()


def report(what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except SafepointError as error:
        print(f"{what}: {error.exit_code.name}: {error}")


if sys.argv[2] == "first":
    train(session("grown"))
else:
    report("no data", lambda: train(session("empty", data=None)))
    report("no step", forget)
    report("another model", lambda: train(session("grown", width=5)))
    report("another loop", lambda: train(session("foreign")))
