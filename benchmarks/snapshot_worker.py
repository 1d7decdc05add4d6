"""Measures one system of `bench_snapshot.py`, or the machine's limits, in its own process.

Writes JSON lines to `--result`: what each save, each pair of training windows and the memory came to, or why there
is nothing. Order of a system: start, two steps, the first save, `--saves` further ones with nothing beside them, then
pairs of `--steps` training steps with and without one save, in turns which comes first, then one save whose memory is
watched. After each save, off the clock, its files are made durable and the save before it is removed, so that no
system pays for the pages that another one left dirty.
"""

import argparse
import gc
import itertools
import json
import mmap
import os
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from process_family import MARK, pss_bytes
from snapshot_peers import SYSTEMS, System, fsync_folder
from snapshot_training import StepTime, Training

LIMITS = "limits"
WRITE_BYTES = 4 << 20
ALIGNMENT = 4096
Report = Callable[..., None]


class Session:
    """A system, the training that it saves, and the number of the current save."""

    def __init__(self, options: argparse.Namespace, report: Report) -> None:
        self._options = options
        self._report = report
        self._training = Training(options.mb, options.matmuls)
        self._mark = os.environ[MARK]
        before_bytes = pss_bytes(self._mark)
        started_s = time.perf_counter()
        self._system: System = SYSTEMS[options.system](options.folder, self._training.model, self._training.optimizer)
        report("start", seconds=time.perf_counter() - started_s)
        self._before_bytes = before_bytes
        self._step = 0

    def run(self) -> None:
        self._steps(2)
        # The interpreter looks for garbage in all objects each time that their number has grown by a quarter. After
        # the imports such a collection is due within a few calls, takes 0.2 s, and belongs to no system.
        gc.collect()
        for number in range(1 + self._options.saves):
            self._report("save", is_first=number == 0, **self._quiet_save())
        for number in range(self._options.pairs):
            self._report("window", **self._pair(save_first=(number + self._options.turn) % 2 == 0))
        self._report("memory", **self._memory())
        self._system.close()

    def _steps(self, count: int) -> list[StepTime]:
        return [self._training.step(self._system.guard) for _ in range(count)]

    def _save(self) -> float:
        """Start a save; returns how long the call took."""
        self._step += 1
        started_s = time.perf_counter()
        self._system.save(self._step)
        return time.perf_counter() - started_s

    def _quiet_save(self) -> dict[str, float]:
        started_s = time.perf_counter()
        call_s = self._save()
        self._system.wait_durable()
        durable_s = time.perf_counter() - started_s
        self._settle()
        self._steps(1)  # as in training, no two saves are of the same state
        return {"call_s": call_s, "durable_s": durable_s}

    def _pair(self, *, save_first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for is_saving in (save_first, not save_first):
            self._steps(1)
            started_s = time.perf_counter()
            call_s = self._save() if is_saving else 0.0
            steps = self._steps(self._options.steps)
            kind = "with" if is_saving else "without"
            found[f"{kind}_s"] = time.perf_counter() - started_s
            found[f"{kind}_steps_s"] = [step.whole_s for step in steps]
            updates = [step.update_s for step in steps]
            if is_saving:
                found |= {"call_s": call_s, "first_update_s": updates[0]}
                self._system.wait_durable()
                self._settle()
            else:
                found["update_s"] = statistics.median(updates)
        return found

    def _memory(self) -> dict[str, float]:
        """Resident bytes beyond those before the system was started: the most during a save, and after it."""
        samples: list[int] = []
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.is_set():
                samples.append(pss_bytes(self._mark))
                time.sleep(0.01)

        watcher = threading.Thread(target=watch)
        watcher.start()
        self._save()
        self._system.wait_durable()
        is_done.set()
        watcher.join()
        self._settle()
        rest_bytes = pss_bytes(self._mark)
        return {
            "peak_mb": (max(samples) - self._before_bytes) / 1e6,
            "rest_mb": (rest_bytes - self._before_bytes) / 1e6,
        }

    def _settle(self) -> None:
        """Wait until the state is on disk, and bring the disk into the state that the next measurement needs."""
        if self._options.system == "no save":
            return
        written = self._system.path(self._step)
        files = [path for path in (written, *written.rglob("*")) if path.is_file()]
        arrived = sum(path.stat().st_size for path in files)
        if arrived < self._training.num_bytes():
            raise RuntimeError(f"{written.name} holds {arrived} bytes of a state of {self._training.num_bytes()}")
        older = self._system.path(self._step - 1)
        shutil.rmtree(older) if older.is_dir() else older.unlink(missing_ok=True)
        os.sync()


# ---- what the machine can do --------------------------------------------------------------------------------------


def write_direct(target: Path, buffer: mmap.mmap, size: int) -> None:
    """Write the whole buffer with O_DIRECT, then fsync; its length is rounded up to what O_DIRECT takes."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    try:
        with memoryview(buffer) as view:
            for start in range(0, len(buffer), WRITE_BYTES):
                end = min(start + WRITE_BYTES, len(buffer))
                if os.pwrite(descriptor, view[start:end], start) != end - start:
                    raise OSError("a direct write was cut short")
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure_limits(options: argparse.Namespace, report: Report) -> None:
    """A copy by one thread, the disk from warm memory, both together as a bare save, the commit of a small file."""
    tensors = Training(options.mb, 1).tensors()
    # Each tensor begins where a cache line does, as in torch's own archives; unaligned copies are a third slower.
    places = [0, *itertools.accumulate(round_up(tensor.numel() * 4, 64) for tensor in tensors)]
    size = places[-1]
    buffer = mmap.mmap(-1, round_up(size, ALIGNMENT))
    image = torch.frombuffer(buffer, dtype=torch.float32)
    targets = [
        image[place // 4 : place // 4 + tensor.numel()].view_as(tensor)
        for place, tensor in zip(places, tensors, strict=False)
    ]

    def copy() -> None:
        for destination, tensor in zip(targets, tensors, strict=True):
            destination.copy_(tensor)

    target = options.folder / "limit"
    copy()  # faults the buffer in
    for _ in range(1 + options.saves):
        copy()
        warm_s = time.perf_counter()
        copy()
        started_s = time.perf_counter()
        copy()
        copied_s = time.perf_counter()
        write_direct(target.with_suffix(".partial"), buffer, size)
        written_s = time.perf_counter()
        target.with_suffix(".partial").rename(target)
        fsync_folder(options.folder)
        durable_s = time.perf_counter()
        report(
            "limit",
            warm_copy_s=started_s - warm_s,
            copy_s=copied_s - started_s,
            write_s=written_s - copied_s,
            durable_s=durable_s - started_s,
            commit_s=commit_s(options.folder),
            num_bytes=size,
        )
        target.unlink()
        os.sync()


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def commit_s(folder: Path) -> float:
    """Seconds to write, fsync and rename a small file, and to fsync its folder."""
    started_s = time.perf_counter()
    partial = folder / "small.partial"
    with partial.open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / "small")
    fsync_folder(folder)
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=(*SYSTEMS, LIMITS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--matmuls", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--turn", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own; the log keeps their errors
    with options.result.open("a") as result:

        def report(kind: str, **fields: Any) -> None:
            print(json.dumps({"kind": kind, **fields}), file=result, flush=True)

        try:
            measure_limits(options, report) if options.system == LIMITS else Session(options, report).run()
        except BaseException as error:
            reason = (str(error) or "no message").splitlines()[0]
            report("failed", reason=f"{type(error).__name__}: {reason}")
            raise
        report("done")


if __name__ == "__main__":
    main()
