"""Process images against stock CRIU: how long processes are frozen, how long a restore takes, and what is stored.

Two trainings on the CPU: an adapter beside frozen weights, and all weights with AdamW. Each is frozen again and
again, by stock CRIU into memory (tmpfs) and by Safepoint, in turns, while it runs on. Then it is frozen for good by
both, and both images are restored in turns: stock CRIU restores from raw pages in memory; Safepoint reads the image,
compares all digests, writes the raw pages to memory, and restores from them. Limits of the same machine: stock CRIU
by itself, and a copy of the raw pages from memory to memory. Ranks with connections are not measured: a restore
needs addresses that the kernel keeps for a while after the one before has ended.

Needs root and CRIU 4.2 (`make test-images` installs one for the tests, which is used here, too).
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import print_load, print_machine, row, touch_memory, verdict

from safepoint.foundation.processes import tree_of
from safepoint.transparent.criu.program import VARIABLE, Criu, find_criu
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise, raw_bytes
from safepoint.transparent.protection.keys import read_key
from safepoint.transparent.staging import staging
from safepoint.transparent.thaw import thaw_image

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "programs" / "frozen_training.py"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safepoint" / "tests" / "criu" / "criu"
_PR_SET_CHILD_SUBREAPER = 36
SHAPES = ("adapter", "adamw")


@contextlib.contextmanager
def training(shape: str, folder: Path) -> Iterator[int]:
    """A training that has made a few steps; its root process."""
    out = folder / "out"
    words = [sys.executable, str(PROGRAM), str(out), "1000000", *(["lora"] if shape == "adapter" else []), "0.05"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    try:
        while len(steps(out)) < 5:
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        yield process.pid
    finally:
        end()


def steps(out: Path) -> list[str]:
    return out.read_text().splitlines() if out.exists() else []


def end() -> None:
    """End everything that was started or restored: it is below this process, and nothing else is."""
    for pid in tree_of(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def timed(work: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


def stock(criu: Criu, action: str, folder: Path, *words: str) -> float:
    """Run CRIU by itself, with the options that Safepoint uses; how long it took."""
    fixed = ["--no-default-config", "--images-dir", str(folder), "--tcp-established", "--file-locks"]
    command = [criu.path, action, *fixed, "--log-file", str(folder.parent / f"{action}.log"), "-v2", *words]
    return timed(lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL))


def freeze(pid: int, location: ImageLocation, key: Path, *words: str) -> dict[str, float]:
    """Freeze a process with the command; what it answers."""
    command = [sys.executable, "-m", "safepoint.cli.main", "freeze", "--pid", str(pid), "--to", str(location.folder)]
    answer = subprocess.run([*command, "--key", str(key), "--json", *words], check=True, capture_output=True)
    return json.loads(answer.stdout)


def measure(criu: Criu, shape: str, options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        raw = Path(memory) / "raw"
        key = Path(disk) / "key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        location = ImageLocation(Path(disk) / "images", read_key(key))
        encrypting = ["--encrypt"] if options.encrypt else []
        frozen: dict[str, list[float]] = {"stock CRIU": [], "safepoint": []}
        shares: list[tuple[float, float]] = []
        with training(shape, Path(disk)) as pid:
            for _ in range(options.rounds):
                shutil.rmtree(raw, ignore_errors=True)
                raw.mkdir()
                frozen["stock CRIU"].append(stock(criu, "dump", raw, "--tree", str(pid), "--leave-running"))
                found = freeze(pid, location, key, "--leave-running", *encrypting)
                frozen["safepoint"].append(found["frozen_s"])
                size_share = found["size_bytes"] / found["memory_bytes"]
                shares.append((found["num_stored"] / found["num_pages"], size_share))
            # The last ones, a few steps apart.
            shutil.rmtree(raw)
            raw.mkdir()
            stock(criu, "dump", raw, "--tree", str(pid), "--leave-running")
            freeze(pid, location, key, *encrypting)
            end()
            name = location.newest()
            size, target = raw_bytes(location.read(name)), Path(memory) / "target"
            restored: dict[str, list[float]] = {"stock CRIU": [], "safepoint": [], "of it, reading": [], "copy": []}
            for _ in range(options.rounds):
                restored["stock CRIU"].append(stock(criu, "restore", raw, "--restore-detached"))
                end()
                restored["safepoint"].append(timed(lambda: thaw_image(criu, location, name)))
                end()
                with staging(size, Path(disk)) as stage:
                    restored["of it, reading"].append(timed(lambda: materialise(location, name, stage.pages)))
                restored["copy"].append(timed(lambda: shutil.copytree(raw, target)))
                shutil.rmtree(target)
    return report(shape, size, frozen, restored, shares)


def report(
    shape: str,
    size: int,
    frozen: dict[str, list[float]],
    restored: dict[str, list[float]],
    shares: list[tuple[float, float]],
) -> list[str]:
    lines = [f"   {shape}: {size / 1e6:.0f} MB of memory"]
    lines += [row(f"frozen, {name}", values, unit="s") for name, values in frozen.items()]
    lines += [row(f"restored, {name}", values, unit="s") for name, values in restored.items()]
    ratio = statistics.median(frozen["safepoint"]) / statistics.median(frozen["stock CRIU"])
    lines.append(verdict(f"{shape}: frozen, against stock CRIU", value=ratio, goal=1.1, at_most=True, unit="x"))
    ratio = statistics.median(restored["safepoint"]) / statistics.median(restored["stock CRIU"])
    lines.append(verdict(f"{shape}: thaw, against stock CRIU", value=ratio, goal=1.25, at_most=True, unit="x"))
    rate = size / 1e9 / statistics.median(restored["of it, reading"])
    lines.append(verdict(f"{shape}: reading the image", value=rate, goal=2, at_most=False, unit="GB/s"))
    pages, size_share = (statistics.median(values) for values in zip(*shares[1:], strict=True))
    if shape == "adapter":
        lines.append(verdict("pages of a later image", value=100 * pages, goal=11, at_most=True, unit="%"))
        lines.append(verdict("bytes of a later image", value=100 * size_share, goal=12, at_most=True, unit="%"))
    else:
        lines.append(f"   pages of a later image {100 * pages:.1f} %, bytes {100 * size_share:.1f} %")
    lines.append(f"   the first image: pages {100 * shares[0][0]:.1f} %, bytes {100 * shares[0][1]:.1f} %")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--encrypt", action="store_true", help="encrypt the images; otherwise they are authenticated")
    parser.add_argument("--touch-memory", action="store_true", help="first write to all free memory once")
    options = parser.parse_args()
    criu = find_criu(str(_CACHE) if _CACHE.exists() else None)
    os.environ[VARIABLE] = criu.path
    # Restored processes become children of this one, so that it can wait for their end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print_machine(f"process images, CRIU {criu.version}, {'encrypted' if options.encrypt else 'authenticated'}")
    if options.touch_memory:
        touch_memory()
    for shape in options.shapes:
        print("\n".join(measure(criu, shape, options)), flush=True)
    print_load("after")


if __name__ == "__main__":
    main()
