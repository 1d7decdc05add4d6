"""Writes what a rank can see of its own process, as JSON: equal for ranks that were started in different ways."""

import gc
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import yaml


class Thing:
    """Has to be found in `__main__` by other processes."""

    def __init__(self, value: int) -> None:
        self.value = value


def double(thing: Thing) -> Thing:
    return Thing(2 * thing.value)


def pool(method: str) -> list[int]:
    with multiprocessing.get_context(method).Pool(1) as workers:
        return [thing.value for thing in workers.map(double, [Thing(1), Thing(2)])]


def main() -> None:
    out = Path(sys.argv[1])
    rank = os.environ["RANK"]
    starts = out / f"starts-{rank}"
    with starts.open("a") as file:
        file.write("x")
    number = len(starts.read_text())
    per_process = {"SAFEPOINT_LAUNCHER_PID", "SAFEPOINT_RECORD_FOLDER", "SAFEPOINT_KEEPER", "SAFEPOINT_PRELOAD"}
    per_process |= {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
    main_module = sys.modules["__main__"]
    found = {
        "is_session_leader": os.getsid(0) == os.getpid() == os.getpgid(0),
        "is_child_of_launcher": os.getppid() == int(os.environ["SAFEPOINT_LAUNCHER_PID"]),
        "comm": Path("/proc/self/comm").read_text(),
        "command": Path("/proc/self/cmdline").read_bytes().decode().split("\0")[1:],
        "folder": os.getcwd(),
        "umask": os.umask(0o22),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "handlers": {str(number): str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "environment": {name: text for name, text in os.environ.items() if name not in per_process},
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "flags": str(sys.flags),
        "path": sys.path,
        "main": [main_module.__name__, main_module.__file__, str(main_module.__spec__), Thing.__module__],
        "pickled": pickle.dumps(Thing(1)).hex(),
        "hash": hash("text"),
        "set": list({"a", "b", "c", "d"}),
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "product": float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()),
        "inverse": float(np.linalg.inv(np.eye(64) + 1).sum()),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "fork": pool("fork"),
        "spawn": pool("spawn"),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "stdin": os.fstat(0).st_rdev,
        "yaml": yaml.__name__,
    }
    random_numbers = [random.random(), float(np.random.rand()), torch.initial_seed(), float(torch.rand(1))]
    (out / f"probe-{rank}-{number}.json").write_text(json.dumps({"found": found, "random": random_numbers}))
    print(f"rank {rank} start {number} has ended", flush=True)
    if number == 1 and rank == "1" and len(sys.argv) > 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
