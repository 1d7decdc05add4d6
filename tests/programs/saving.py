"""Processes that save with a Checkpointer and wait to be killed: `python -m tests.programs.saving FOLDER`.

There is one of each kind, which saves below FOLDER. It says on stdout, in one line of JSON, when it is where it is to
be killed. They are forked from one, as they need torch all of them.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

import torch
from tests.support.snapshots import LARGE_STATE_ELEMENTS

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.checkpointer import Checkpointer
from safepoint.snapshot.staging.stager import Stager

KINDS = ("staged", "half", "forked")


def save(folder: str, how: str) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((LARGE_STATE_ELEMENTS,), 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = Checkpointer(folder, slots=2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "notes": {"step": 1}}
    checkpointer.save(state, 1).wait()
    model.weight.grad = torch.full_like(model.weight, -1.0)
    optimizer.step()
    state["notes"] = {"step": 2}
    keeper = checkpointer._host.pid
    child = 0
    if how == "half":
        reached = threading.Event()

        def never(*_: Any) -> None:
            reached.set()
            threading.Event().wait()

        Stager._copy = never  # type: ignore[method-assign]
        checkpointer.save(state, 2)
        reached.wait()
    else:
        os.kill(keeper, signal.SIGSTOP)  # so that nothing is written before this process is gone
        checkpointer.save(state, 2, trigger=Trigger.PERIODIC).wait_staged()
    if how == "forked":
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    said = {"how": how, "pid": os.getpid(), "keeper": keeper, "child": child, "key": checkpointer._host.key}
    os.write(1, f"{json.dumps(said)}\n".encode())
    signal.pause()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()  # imports once what all of them need
    for how in KINDS:
        if os.fork() == 0:
            save(f"{folder}/{how}", how)
    for _ in KINDS:
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
