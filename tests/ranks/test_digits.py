"""The example of a hand-written loop, interrupted in several ways."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import Job, environment, no_orphans, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(300)]

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


# The example, in a folder of its own, because it writes below the current one; and slow enough to be caught.
PROGRAM = f"""
import os, runpy, sys, time
from torch.nn import functional
os.chdir(sys.argv[1])
loss = functional.cross_entropy
functional.cross_entropy = lambda *given: (time.sleep(0.02), loss(*given))[1]
runpy.run_path({str(DIGITS)!r}, run_name="__main__")
"""


def _start(folder: Path) -> Job:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return Job(command, folder / "digits-output", log=folder / "log", env=environment())


def _end(folder: Path) -> dict[str, Any]:
    checkpoint = folder / "digits-output" / "checkpoint-300"
    return {
        name: torch.load(checkpoint / f"{name}.pt", weights_only=True) for name in ("model", "optimizer", "scheduler")
    }


def test_digits_are_learned_whatever_happens(tmp_path: Path) -> None:
    """After Ctrl-C, SIGKILL and two resumes, the result is bit-equal and right for unseen digits."""
    whole = _start(tmp_path / "whole")
    with no_orphans(whole):
        assert whole.wait() == 0, whole.text
    folder = tmp_path / "parts"
    for number, name, code in ((signal.SIGINT, "saved", 75), (signal.SIGKILL, "resumed", -signal.SIGKILL)):
        job = _start(folder)
        with no_orphans(job):
            job.wait_for_event(name)
            job.wait_for_step(60 if number == signal.SIGINT else 150)
            job.signal(number)
            assert job.wait() == code, job.text
    last = _start(folder)
    with no_orphans(last):
        assert last.wait() == 0, last.text
    assert len(read_events(folder / "digits-output", "resumed")) == 2
    said = [line for job in (whole, last) for line in job.text.splitlines() if "digits that it had not seen" in line]
    assert said[0] == said[1]
    assert float(said[0].split("%")[0]) > 80
    ours, theirs = _end(folder), _end(tmp_path / "whole")
    flat = [torch.utils._pytree.tree_flatten(state)[0] for state in (ours, theirs)]
    assert len(flat[0]) == len(flat[1])
    for one, other in zip(*flat, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
