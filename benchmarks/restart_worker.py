"""One rank of `bench_restart.py`: `save` leaves a snapshot with the keeper and waits to be killed; `load` follows.

JSON lines go to stdout. The model is a safetensors file and the optimizer torch's own, as the Trainer writes them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from snapshot_training import Training

from safepoint.checkpoint.format.manifest import ManifestFacts, Trigger
from safepoint.snapshot.images.module_state import ModuleState, OptimizerState
from safepoint.snapshot.images.safetensors_image import compose_safetensors
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.keeper_client.snapshotter import Snapshotter
from safepoint.snapshot.protocol.messages import CheckpointFacts, Goodbye, ReleaseEarlierSnapshot

STEP = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.pt"
PLACES = ("memory", "disk, warm", "disk, cold")
WAYS = ("copied", "mapped")


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def connect(options: argparse.Namespace, restart: int) -> KeeperClient:
    keeper = KeeperClient.connect(options.keeper, wait_s=20, rank=0, num_ranks=1, restart=restart)
    if keeper is None:
        raise SystemExit("the keeper does not answer")
    return keeper


def save(options: argparse.Namespace) -> None:
    training = Training(options.mb, 1)
    keeper = connect(options, 0)
    if error := keeper.open_folder(str(options.folder)):
        raise SystemExit(error)
    snapshotter = Snapshotter(keeper, optimizers=[training.optimizer], on_torn=lambda _: None)
    weights = compose_safetensors(MODEL, ModuleState(training.model).state_dict(), {"format": "pt"})
    assert weights is not None
    images = [weights, TorchImages(OPTIMIZER).compose(OptimizerState(training.optimizer).state_dict())]
    manifest = ManifestFacts(
        run_id="bench",
        attempt=1,
        step=STEP,
        epoch=0.0,
        world_size=1,
        global_batch=1,
        gradient_accumulation=1,
        samples_seen=STEP,
        strategy="single",
    )
    facts = CheckpointFacts(folder=str(options.folder.absolute()), attempt_id="bench-1", manifest=manifest)
    if not snapshotter.take(STEP, images, trigger=Trigger.PERIODIC, is_requested=True, facts=facts, number=1):
        raise SystemExit("the keeper has no room")
    snapshotter.wait_staged()
    outcome = keeper.wait(STEP)
    say(error=outcome.error, num_bytes=outcome.size_bytes)
    time.sleep(3600)


def load(options: argparse.Namespace) -> None:
    started_s = time.perf_counter()
    keeper = connect(options, 1)
    connected_s = time.perf_counter()
    recalled = keeper.find_earlier_snapshot()
    recall_s = time.perf_counter() - connected_s
    if recalled is None:
        raise SystemExit("nothing was left in memory")
    say(kind="recall", connect_s=connected_s - started_s, recall_s=recall_s)
    training = Training(options.mb, 1)
    on_disk = options.folder / f"checkpoint-{STEP}"
    for way in WAYS:  # modules are imported, tables built
        load_file(on_disk / MODEL)
        load_optimizer(torch.optim.AdamW(training.model.parameters(), lr=1e-6), on_disk / OPTIMIZER, way)
    turns = [(place, way) for place in PLACES for way in WAYS]
    first = options.turn % len(turns)
    for place, way in turns[first:] + turns[:first]:
        folder = Path(recalled.folder) if place == "memory" else on_disk
        for name in (MODEL, OPTIMIZER):
            if place != "memory":
                forget(folder / name) if place == "disk, cold" else (folder / name).read_bytes()
        # Nothing of the last turn: a rank that starts has an optimizer without moments.
        optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-6)
        model_s = timed(lambda folder=folder: training.model.load_state_dict(load_file(folder / MODEL)))
        optimizer_s = timed(lambda o=optimizer, f=folder, w=way: load_optimizer(o, f / OPTIMIZER, w))
        say(kind="load", place=place, way=way, model_s=model_s, optimizer_s=optimizer_s)
        is_equal = all(
            torch.equal(value, training.optimizer.state[parameter][name])
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
        )
        if not is_equal:
            raise SystemExit(f"what was loaded from {place} is not what was saved")
    keeper.send(ReleaseEarlierSnapshot())
    keeper.send(Goodbye())
    keeper.close()


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path, way: str) -> None:
    """Load it as the Trainer does, into new memory; or mapped, and copied when it is written to."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=way == "mapped")
    optimizer.load_state_dict(state)
    if way == "mapped":
        # What the first step does: each page is written to.
        for values in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                values[name].mul_(1)


def timed(call: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def forget(path: Path) -> None:
    """Remove the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("save", "load"))
    parser.add_argument("--keeper", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--turn", type=int, default=0)
    options = parser.parse_args()
    save(options) if options.role == "save" else load(options)


if __name__ == "__main__":
    main()
