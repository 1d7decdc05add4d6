"""The page store: speed of comparing, compressing and restoring pages, peak memory, and the size of a second image.

Streams in the shape of a frozen training of an adapter: the frozen base weights are the same in both images, at
another place in the second one, as after the CUDA driver has copied them; adapter, optimizer and activations change.
Limits of the same machine: a copy of the stream from file to file, and LZ4 by itself.

Each figure has a process of its own, so that its memory is its own. Goals: comparing ≥ 1 GB/s of one processor, LZ4
≥ 1 GB/s over all, restoring ≥ 2 GB/s over all, ≤ 256 MB of memory, ≤ 11 % of pages and ≤ 12 % of bytes in the second
image.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from safepoint.transparent.pages.layout import PAGE_BYTES
from safepoint.transparent.pages.older import OlderPages
from safepoint.transparent.pages.reader import restore_pages
from safepoint.transparent.pages.regions import RegionFile, compress
from safepoint.transparent.pages.table import PageFileId, PageTable
from safepoint.transparent.pages.writer import regions_name, table_name, write_pages

_SEED = 21


def make(folder: Path, megabytes: int) -> None:
    """Two streams: 88 % frozen weights, of which half are quantized and compress; the rest changes."""
    generator = np.random.default_rng(_SEED)
    num_pages = megabytes * (1 << 20) // PAGE_BYTES
    num_frozen = num_pages * 88 // 100
    with (folder / "first").open("wb") as first, (folder / "second").open("wb") as second:
        second.write(generator.bytes(64 * PAGE_BYTES))  # so that everything has another place
        for begin in range(0, num_frozen, 1024):
            count = min(1024, num_frozen - begin) * PAGE_BYTES
            is_quantized = begin // 1024 % 2
            block = generator.integers(0, 12, count, np.uint8).tobytes() if is_quantized else generator.bytes(count)
            first.write(block)
            second.write(block)
        num_changed = num_pages - num_frozen
        for file in (first, second):
            file.write(generator.bytes(num_changed * 9 // 10 * PAGE_BYTES))
            file.write(bytes(num_changed // 10 * PAGE_BYTES))


def tables(folder: Path, image: str) -> dict[PageFileId, PageTable]:
    found = {PageFileId(1, 0, 1): PageTable.open(folder / image / table_name(1))}
    if image == "image-2":
        found[PageFileId(2, 0, 1)] = PageTable.open(folder / "image-1" / table_name(1))
    return found


def write(folder: Path, image: str, stream: str) -> dict[str, float]:
    target = folder / image
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    older = None
    if image == "image-2":
        older = OlderPages({(0, 1): tables(folder, "image-1")[PageFileId(1, 0, 1)]})
    with (folder / stream).open("rb", buffering=0) as source:
        done = write_pages(source, target, part=0, file=1, seed=_SEED, older=older)
    return {
        "pages": done.num_stored / done.num_pages,
        "bytes": (done.regions.size_bytes + done.table.size_bytes) / (done.num_pages * PAGE_BYTES),
    }


def restore(folder: Path) -> dict[str, float]:
    found = tables(folder, "image-2")
    table = found[PageFileId(1, 0, 1)]
    table.check_runs({key: one.header.num_stored for key, one in found.items()})
    files = {key: RegionFile(folder / f"image-{3 - key.image}" / regions_name(1), found[key]) for key in found}
    (folder / "restored").unlink(missing_ok=True)
    descriptor = os.open(folder / "restored", os.O_RDWR | os.O_CREAT)
    restore_pages(table, files, descriptor)
    os.close(descriptor)
    return {}


def copy(folder: Path) -> dict[str, float]:
    shutil.copyfile(folder / "second", folder / "restored")
    return {}


def lz4_alone(folder: Path) -> dict[str, float]:
    with (folder / "second").open("rb") as source:
        while block := source.read(256 << 10):
            compress(memoryview(block))
    return {}


WORK: dict[str, Callable[[Path], dict[str, float]]] = {
    "copy": copy,
    "lz4": lz4_alone,
    "first": lambda folder: write(folder, "image-1", "first"),
    "second": lambda folder: write(folder, "image-2", "second"),
    "restore": restore,
}


def peak_kb() -> int:
    """The most memory that this process has had, mapped tables included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def work(name: str, folder: Path) -> None:
    """Do one thing in this process, and print its time, processor time and peak of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_kb = peak_kb()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    found = WORK[name](folder)
    took_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
    peak_mb = (peak_kb() - before_kb) / 1024
    print(json.dumps({**found, "took_s": took_s, "cpu_s": cpu_s, "peak_mb": peak_mb}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=2048, help="size of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="work below this folder")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.folder)
        return
    from figures import print_load, print_machine, verdict  # not at the top: imports torch, whose memory is not ours

    print_machine(f"page store, two streams of {options.mb} MB")
    gigabytes, cores = options.mb * (1 << 20) / 1e9, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="hf-bench-", dir=options.folder) as temporary:
        folder = Path(temporary)
        make(folder, options.mb)
        best: dict[str, dict[str, float]] = {}
        for _ in range(options.rounds):
            for name in WORK:
                command = [sys.executable, __file__, "--work", name, "--folder", temporary]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                kept = best.setdefault(name, found)
                for key, value in found.items():
                    kept[key] = max(kept[key], value) if key == "peak_mb" else min(kept[key], value)
        same = subprocess.run(["cmp", folder / "second", folder / "restored"], check=False)
        print(f"   restored bit for bit: {same.returncode == 0}")
    print("   best of the rounds: GB/s by the clock, GB/s of one processor, peak memory MB beyond the imports")
    for name, found in best.items():
        rates = (gigabytes / found["took_s"], gigabytes / max(found["cpu_s"], 1e-9))
        print(f"   {name:<20} {rates[0]:9.2f} {rates[1]:9.2f} {found['peak_mb']:9.1f}")
    second = best["second"]
    print(verdict("compare, one processor", value=gigabytes / second["cpu_s"], goal=1, at_most=False, unit="GB/s"))
    rate = gigabytes / best["first"]["cpu_s"] * cores
    print(verdict(f"first image, {cores} processors", value=rate, goal=1, at_most=False, unit="GB/s"))
    rate = gigabytes / best["restore"]["cpu_s"] * cores
    print(verdict(f"restore, {cores} processors", value=rate, goal=2, at_most=False, unit="GB/s"))
    peak = max(best[name]["peak_mb"] for name in ("first", "second", "restore"))
    print(verdict("peak memory", value=peak, goal=256, at_most=True, unit="MB"))
    print(verdict("pages of the second image", value=100 * second["pages"], goal=11, at_most=True, unit="%"))
    print(verdict("bytes of the second image", value=100 * second["bytes"], goal=12, at_most=True, unit="%"))
    print_load("after")


if __name__ == "__main__":
    main()
