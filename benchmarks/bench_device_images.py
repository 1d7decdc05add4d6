"""Images of a training on a CUDA device: pages stored, bytes, how long it is stopped, and how long a thaw takes.

The training has adapters beside 8 GB of quantized weights (`tests/programs/cuda_adapters.py`). While it runs on,
stock CRIU dumps it into memory (tmpfs), between the same calls of the driver, and Safepoint freezes it twice. Then
Safepoint freezes and ends it, and thaws it. Each line that the training writes is compared with the lines of a
training that was never frozen, which runs first: some lines soon after the thaw, and all of them at the end.

The images are in memory, too. Needs a CUDA device, root, CRIU 4.2, and 50 GB of memory. On an H200 it needs five
minutes.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_images import ROOT, stock, timed
from figures import print_load, print_machine

sys.path.insert(0, str(ROOT))
from tests.support.criu import environment, unavailable

from safepoint.transparent.criu.program import VARIABLE, find_criu
from safepoint.transparent.cuda.driver import find_driver
from safepoint.transparent.cuda.gpus import used_bytes
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise
from safepoint.transparent.protection.keys import read_key

PROGRAM = ROOT / "tests" / "programs" / "cuda_adapters.py"
NUM_STEPS = 120
_LIMIT_S = 300


class Training:
    """The training, in the background."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out = out
        with out.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(out), str(NUM_STEPS), *words],
                env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    def reach(self, num_lines: int) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while len(self.lines()) < num_lines:
            if self.process.poll() or time.monotonic() > deadline_s:
                log = self.out.with_suffix(".log").read_text()
                raise SystemExit(f"the training has written {len(self.lines())} lines:\n{log}")
            time.sleep(0.05)


def safepoint(*words: object) -> tuple[dict[str, Any], float]:
    """Run a command; its answer, and how long it took."""
    command = [sys.executable, "-m", "safepoint.cli.main", *map(str, words), "--json"]
    begun_s = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begun_s
    if done.returncode != 0:
        raise SystemExit(f"{words} failed:\n{done.stderr}{done.stdout}")
    return json.loads(done.stdout), seconds


def report(title: str, **figures: object) -> None:
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(f"   {title}: {json.dumps(shown)}", flush=True)


def dump_with_stock_criu(pid: int, raw: Path) -> None:
    """How long the training is stopped: the driver's calls, and stock CRIU between them."""
    criu, driver = find_criu(), find_driver()
    raw.mkdir()
    seconds = {"lock": timed(lambda: driver.lock(pid, 5000)), "checkpoint": timed(lambda: driver.checkpoint(pid))}
    try:
        seconds["dump"] = stock(criu, "dump", raw, "--tree", str(pid), "--leave-running")
    finally:
        seconds["restore"] = timed(lambda: driver.restore(pid, {}))
        seconds["unlock"] = timed(lambda: driver.unlock(pid))
    size = sum(path.stat().st_size for path in raw.iterdir())
    report("stock CRIU, the training runs on", stopped_s=sum(seconds.values()), size_bytes=size, **seconds)
    shutil.rmtree(raw)


def freeze(pid: int, folder: Path, title: str, *words: str) -> None:
    found, seconds = safepoint("freeze", "--pid", pid, "--to", folder, *words)
    pages, stored = found["num_pages"], found["num_stored"]
    zero = sum(one.num_zero for one in ImageLocation(folder).read(found["name"]).page_files)
    report(
        title,
        stopped_s=found["frozen_s"],
        command_s=seconds,
        staged_in=found["staged_in"],
        pages=pages,
        zero=zero,
        stored=stored,
        stored_share=stored / pages,
        memory_bytes=found["memory_bytes"],
        size_bytes=found["size_bytes"],
        size_share=found["size_bytes"] / found["memory_bytes"],
    )


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def compare(training: Training, reference: Training, title: str) -> None:
    """Compare the lines that the training has written until now."""
    lines = training.lines()
    if lines != reference.lines()[: len(lines)]:
        raise SystemExit(f"{title}: the training differs from the one that was not frozen")
    report(title, is_equal=True, lines=len(lines), of=NUM_STEPS + 1)


def measure(folder: Path) -> None:
    reference = Training(folder / "reference")
    with ended(reference.pid):
        begun_s = time.monotonic()
        reference.reach(NUM_STEPS + 1)
        report("a training that is not frozen", seconds=time.monotonic() - begun_s)
    training, images = Training(folder / "out", "--pause-s", "0.4"), folder / "images"
    with ended(training.pid):
        training.reach(3)
        report("the training", device_bytes=used_bytes([training.pid]))
        dump_with_stock_criu(training.pid, folder / "raw")
        freeze(training.pid, images, "first image, the training runs on", "--leave-running")
        training.reach(len(training.lines()) + 3)
        freeze(training.pid, images, "second image, the training runs on", "--leave-running")
        training.reach(len(training.lines()) + 3)
        freeze(training.pid, images, "third image, the training ends")
    training.process.wait()
    frozen_at = len(training.lines())
    restored, seconds = safepoint("thaw", images)
    with ended(restored["pid"]):
        report("thawed", command_s=seconds, at_step=frozen_at, has_own_namespace=restored["has_own_namespace"])
        Path(f"{training.out}.fast").touch()
        training.process.returncode = 0  # the restored process is not a child
        training.reach(frozen_at + 3)
        compare(training, reference, "soon after the thaw")
        training.reach(NUM_STEPS + 1)
        compare(training, reference, "at the end")
    key = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"), "safepoint", "images.key")
    location, target = ImageLocation(images, read_key(key)), folder / "target"
    target.mkdir()
    name = location.newest()
    reading_s = timed(lambda: materialise(location, name, target))
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    report("reading the newest image into memory", seconds=reading_s, gigabytes_per_s=size / 1e9 / reading_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="make the images below this folder")
    options = parser.parse_args()
    reason = unavailable() if torch.cuda.is_available() else "this machine has no CUDA device"
    if reason is not None:
        print(f"   NOT RUN: {reason}")
        return
    os.environ[VARIABLE] = environment().get(VARIABLE, "")
    driver = find_driver()
    print_machine(f"images of a training on a device, by {driver.name}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        measure(Path(temporary))
    print_load("after")


if __name__ == "__main__":
    main()
