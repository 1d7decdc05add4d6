"""Restarts: of whole jobs, and the load of a snapshot from memory.

Jobs (`--part jobs`): the same Trainer script under `safepoint run`, and under `torchrun` with the Trainer's own
resume; see `restart_jobs.py`. Goal for a tiny state and two ranks: the first step 0.9 s after kill -9, in the median.

Memory (`--part memory`): a killed rank's successor loads model and optimizer from the keeper's memory, against the
checkpoint on disk. One process saves a snapshot with a keeper and is killed with SIGKILL when it is durable; a second
one connects, asks for the snapshot back (the keeper compares it with its digests and makes links), and loads it. The
same files are loaded from disk, with the page cache warm and after it was emptied of them. *Copied* is how the
Trainer loads an optimizer, into new memory; *mapped* leaves it where it is, until the first step writes to it, which
is counted. Goal: 0.2 s for each GB from memory, the faster way. Limit: a copy of as many bytes into memory that is
there.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import print_load, print_machine, row, verdict
from restart_jobs import measure
from restart_worker import PLACES, WAYS

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.snapshot.keeper_client.process import KeeperProcess
from safepoint.snapshot.protocol.channel import new_keeper_key
from safepoint.snapshot.protocol.messages import KeeperPlan

WORKER = Path(__file__).parent / "restart_worker.py"
GOAL_S_PER_GB = 0.2


def run_round(turn: int, folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """The figures of one killed rank and its successor; the snapshot's bytes come first."""
    OutputFolder(folder).prepare()
    host = KeeperProcess(KeeperPlan(key=new_keeper_key()))
    common = ["--keeper", host.key, "--folder", str(folder), "--mb", str(options.mb), "--turn", str(turn)]
    saver = subprocess.Popen([sys.executable, str(WORKER), "save", *common], stdout=subprocess.PIPE, text=True)
    try:
        assert saver.stdout is not None
        line = saver.stdout.readline()
        if not line:
            raise SystemExit("the rank that saves has failed")
        saved = json.loads(line)
        if saved["error"]:
            raise SystemExit(saved["error"])
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        done = subprocess.run(
            [sys.executable, str(WORKER), "load", *common], stdout=subprocess.PIPE, text=True, check=True
        )
        return [saved, *map(json.loads, done.stdout.splitlines())]
    finally:
        with contextlib.suppress(ProcessLookupError):
            saver.kill()
        saver.wait()
        host.finish(20)


def copy_s(num_bytes: int) -> tuple[float, float]:
    """One thread from warm memory to warm memory, and to memory that the process did not have before."""
    torch.set_num_threads(1)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    warm, fresh = [], []
    for _ in range(3):
        started_s = time.perf_counter()
        target.copy_(source)
        warm.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        torch.empty(num_bytes, dtype=torch.uint8).copy_(source)
        fresh.append(time.perf_counter() - started_s)
    return min(warm), min(fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=960, help="of model and optimizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="save below this folder; a disk, not a file system in memory")
    jobs = parser.add_argument_group("whole jobs")
    parser.add_argument("--part", choices=("all", "jobs", "memory"), default="all")
    jobs.add_argument("--jobs", type=int, default=5, help="of each product")
    jobs.add_argument("--kills", type=int, default=2, help="in each job")
    jobs.add_argument("--peer-kills", type=int, help="in each job of torchrun, if not as many")
    jobs.add_argument("--ranks", type=int, default=2)
    jobs.add_argument("--state-mb", type=int, default=1, help="of model and optimizer in each job")
    jobs.add_argument("--step-ms", type=float, default=50)
    jobs.add_argument("--save-steps", type=int, default=10)
    jobs.add_argument("--seed", type=int, default=1, help="moment of the kill within a step")
    jobs.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="all ranks share the first CUDA device"
    )
    jobs.add_argument("--backend", help="gloo for several ranks on one CUDA device, which NCCL refuses")
    jobs.add_argument("--limit-s", type=float, default=1e9, help="start no further job after this time")
    jobs.add_argument("--logs", type=Path, help="keep the log of each job in this folder")
    jobs.add_argument(
        "--variant", type=str.split, action="append", help="options of `safepoint run`; each variant is measured"
    )
    options = parser.parse_args()
    options.variant = options.variant or [[]]
    if options.part != "memory":
        print_machine("starts and restarts of whole jobs")
        measure(options)
        print_load("after")
    if options.part != "jobs":
        measure_memory(options)


def measure_memory(options: argparse.Namespace) -> None:
    print_machine(f"restart of a killed rank with {options.mb} MB of state")
    recalls: list[float] = []
    limits: list[tuple[float, float]] = []
    loads: dict[tuple[str, str], list[tuple[float, float]]] = {(p, w): [] for p in PLACES for w in WAYS}
    gigabytes = 0.0
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="safepoint-bench-", dir=options.folder) as temporary:
            saved, *figures = run_round(turn, Path(temporary), options)
        gigabytes = saved["num_bytes"] / 1e9
        limits.append(copy_s(int(saved["num_bytes"])))
        for figure in figures:
            if figure["kind"] == "recall":
                recalls.append(figure["connect_s"] + figure["recall_s"])
            else:
                loads[figure["place"], figure["way"]].append((figure["model_s"], figure["optimizer_s"]))
    print(f"   {gigabytes:.3f} GB; seconds for each GB")
    print(row("recall: comparison and links", [seconds / gigabytes for seconds in recalls], unit="s/GB"))
    whole: dict[tuple[str, str], list[float]] = {}
    for (place, way), seconds in loads.items():
        whole[place, way] = [sum(pair) / gigabytes for pair in seconds]
        print(row(f"from {place}, {way}", whole[place, way], unit="s/GB"))
        for index, part in enumerate(("model", "optimizer")):
            print(row(f"  of it the {part}", [pair[index] / gigabytes for pair in seconds], unit="s/GB"))
    print(row("limit: copy to warm memory", [warm / gigabytes for warm, _ in limits], unit="s/GB"))
    print(row("limit: copy to memory new to the process", [fresh / gigabytes for _, fresh in limits], unit="s/GB"))
    best = min(statistics.median(whole["memory", way]) for way in WAYS)
    print(verdict("from memory", value=best, goal=GOAL_S_PER_GB, at_most=True, unit="s/GB"))
    for place in PLACES[1:]:
        other = min(statistics.median(whole[place, way]) for way in WAYS)
        print(f"   {f'times sooner than from {place}':<46} {other / best:.2f} times")
    print_load("after")


if __name__ == "__main__":
    main()
