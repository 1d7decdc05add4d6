"""From a checkpoint in pieces to the files that `from_pretrained` reads: memory, extra disk and time.

A model of fp32 tensors, written by two ranks through torch.distributed.checkpoint, and by DeepSpeed's ZeRO-3.
Safepoint's export against accelerate's merge, DCP's consolidation into one file of torch, and `zero_to_fp32.py`; each
has a process of its own. Memory: the peak beyond what the process has after its imports. Extra disk: the most that
lay beside the output while it was written. Limit: a copy of as many bytes from file to file.

Then into an object store, Ceph RGW on loopback, from a folder and from the same store; against an export to a folder
that is uploaded from there. Limit: as many bytes from memory into the store.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import print_load, print_machine, verdict

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.ceph_rgw import ceph_rgw, unavailable

WORKER = Path(__file__).parent / "export_worker.py"
PEERS = {
    "dcp": ("safepoint", "accelerate", "dcp to torch.save", "copy"),
    "zero": ("safepoint", "zero_to_fp32", "copy"),
}
_STORE_MB = 7 * 1024
IN_STORE = ("into a store", "store to store", "over a folder", "stream")
GOAL_DISK, GOAL_MEMORY_MB = 0.05, 64


def run(
    *arguments: str, num_ranks: int = 0, temporary: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    )
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **env}
    if "zero" in " ".join(arguments):
        variables["PYTHONPATH"] = str(Path(sys.prefix) / "deepspeed")
    if temporary is not None:
        variables["TMPDIR"] = str(temporary)
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    if done.returncode != 0:
        raise SystemExit(f"{arguments}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


class Watch:
    """The largest size that a folder has had."""

    def __init__(self, folder: Path) -> None:
        self.peak_bytes = 0
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, size_of(self._folder))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def measure(system: str, checkpoint: Path, work: Path, size_bytes: int, **env: str) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(dir=work))
    temporary = folder / "tmp"
    temporary.mkdir()
    with Watch(folder) as watch:
        done = run("export", system, str(checkpoint), str(folder / "out"), temporary=temporary, **env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["extra"] = max(0, watch.peak_bytes - size_of(folder / "out")) / size_bytes
    subprocess.run(["rm", "-r", str(folder)], check=True)
    os.sync()
    time.sleep(0.5)
    return found


def compare(systems: tuple[str, ...], rounds: int, one: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """Let the systems take turns, print their medians, and return those of the first."""
    found: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for turn in range(rounds):
        for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
            found[system].append(one(system))
    middle = {
        system: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for system, figures in found.items()
    }
    print(f"   medians of {rounds}: peak memory MB, extra disk as a share of the output, seconds")
    for system, figures in middle.items():
        print(f"   {system:<20} {figures['peak_mb']:9.1f} {figures['extra']:9.3f} {figures['seconds']:9.2f}")
    return middle[systems[0]]


def judge(ours: dict[str, float], tensor_mb: int) -> None:
    print(verdict("extra disk", value=ours["extra"], goal=GOAL_DISK, at_most=True, unit="of the output"))
    limit = tensor_mb + GOAL_MEMORY_MB
    print(verdict("peak memory", value=ours["peak_mb"], goal=limit, at_most=True, unit="MB"))


def in_store(checkpoint: Path, work: Path, options: argparse.Namespace) -> None:
    reason = unavailable()
    print(f"\n   into an object store{f': left out, {reason}' if reason else ''}")
    if reason:
        return
    with ceph_rgw() as rgw:
        source = rgw.store("bench/source")
        for path in (path for path in checkpoint.rglob("*") if path.is_file()):
            source.upload(str(path.relative_to(checkpoint)), path)

        def one(system: str) -> dict[str, float]:
            place = rgw.location(f"bench/{uuid.uuid4().hex}")
            env = {**rgw.variables, "HF_BENCH_MB": str(options.mb), "HF_BENCH_STORE": str(place)}
            env["HF_BENCH_SOURCE"] = str(source.location)
            return measure(system, checkpoint, work, options.mb << 20, **env)

        # The server has 8 GiB of memory for everything, and is slow to forget what was deleted.
        rounds = (_STORE_MB - options.mb) // (len(IN_STORE) * options.mb)
        judge(compare(IN_STORE, max(1, min(options.rounds, rounds)), one), options.tensor_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024, help="size of the model")
    parser.add_argument("--tensor-mb", type=int, default=32, help="of each weight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="work below this folder; a disk, not a file system in memory")
    options = parser.parse_args()
    print_machine(f"export of a model of {options.mb} MB in weights of {options.tensor_mb} MB")
    for kind, systems in PEERS.items():
        with tempfile.TemporaryDirectory(prefix="hf-bench-", dir=options.folder) as temporary:
            work = Path(temporary)
            checkpoint = work / "checkpoint"
            run("make", kind, str(checkpoint), str(options.mb), str(options.tensor_mb), num_ranks=2)
            print(f"\n   {kind}")
            export = partial(measure, checkpoint=checkpoint, work=work, size_bytes=options.mb << 20)
            judge(compare(systems, options.rounds, export), options.tensor_mb)
            if kind == "dcp":
                in_store(checkpoint, work, options)
    print_load("after")


if __name__ == "__main__":
    main()
