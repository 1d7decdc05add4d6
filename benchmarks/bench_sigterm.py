"""Seconds from SIGTERM to the job's exit: Holdfast against the Trainer's own enable_jit_checkpoint.

The same script, model and settings (tests/programs/tiny.py, steps of about 50 ms), interleaved in one run; SIGTERM to
one process, and to the launcher of two ranks. Counted until the process has gone, and whether it left a checkpoint
that one can resume from. Printed beside: the machine's limit, an fsynced write of the checkpoint's bytes plus one
step. Goal: 10 times sooner.
"""

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.jobs import TINY, Job, environment, no_orphans

from holdfast.checkpoint.catalog import list_checkpoints
from holdfast.checkpoint.verify import verify

STEP_MS = 50
SCRIPT = ["--step-ms", str(STEP_MS), "--grad-accum", "1", "--epochs", "200", "--logging-steps", "1"]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def command(who: str, ranks: int, output: Path) -> list[str]:
    script = [str(TINY), "--out", str(output), *SCRIPT]
    if who == "holdfast":
        if ranks == 1:
            return [sys.executable, "-m", "holdfast.training", *script]
        return [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc-per-node", str(ranks), *script]
    script.append("--jit")
    if ranks == 1:
        return [sys.executable, *script]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", free_port()]
    return [sys.executable, *torchrun, *script]


def trial(who: str, ranks: int, folder: Path) -> tuple[float, bool, int]:
    """Seconds from the signal to the exit, whether the checkpoint is whole, and its size in bytes."""
    output = folder / "run"
    folder.mkdir()
    job = Job(command(who, ranks, output), output, log=folder / "log", env=environment())
    with no_orphans(job):
        job.wait_for("five steps", lambda: job.text.count("'loss'") >= 5, timeout_s=120)
        start = time.perf_counter()
        job.process.send_signal(signal.SIGTERM)
        job.wait(120)
        took = time.perf_counter() - start
    found = list_checkpoints(output)
    if not found:
        return took, False, 0
    size = sum(path.stat().st_size for path in found[0].rglob("*") if path.is_file())
    if who == "holdfast":
        return took, verify(found[0]).is_valid, size
    states = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    whole = all((found[0] / name).exists() for name in ["trainer_state.json", *states])
    return took, whole and not (found[0] / "checkpoint-is-incomplete.txt").exists(), size


def fsynced_write_s(size: int, folder: Path) -> float:
    start = time.perf_counter()
    with (folder / "limit").open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {options.trials} trials each, interleaved")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in (1, 2):
            times: dict[str, list[float]] = {"holdfast": [], "transformers": []}
            whole = {"holdfast": 0, "transformers": 0}
            size = 0
            for number in range(options.trials):
                for who, taken in times.items():
                    took, is_whole, bytes_ = trial(who, ranks, folder / f"{who}-{ranks}-{number}")
                    taken.append(took)
                    whole[who] += is_whole
                    size = max(size, bytes_)
            for who, taken in times.items():
                print(
                    f"{ranks} rank(s) {who:<13} median {statistics.median(taken):6.2f} s  min {min(taken):6.2f} s  "
                    f"whole checkpoints {whole[who]}/{options.trials}"
                )
            ratio = statistics.median(times["transformers"]) / statistics.median(times["holdfast"])
            limit = STEP_MS / 1000 + fsynced_write_s(size, folder)
            verdict = "reached" if ratio >= 10 else "missed"
            print(f"{ranks} rank(s) ratio {ratio:.1f}, goal 10: {verdict}; limit {limit:.2f} s")


if __name__ == "__main__":
    main()
