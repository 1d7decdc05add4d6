"""A teacher that follows the trained model, beside it or as an adapter of it, continues after a resume."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.format.catalog import list_checkpoints
from tests.ranks.test_trl import log_of
from tests.support.equality import same
from tests.support.ingredients import make_ingredients
from tests.support.jobs import TINY, Job, no_orphans, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
pytest.importorskip("trl.experimental.sdft")


@pytest.mark.parametrize("options", [(), pytest.param(("--lora",), marks=pytest.mark.long)])
def test_a_teacher_continues(options: tuple[str, ...], tmp_path: Path) -> None:
    """The final weights, the teacher in the last checkpoint and the log are equal."""
    make_ingredients(tmp_path)

    def start(folder: Path) -> Job:
        program = [str(TINY.parent / "teaching.py"), "--out", str(folder), "--model", str(tmp_path / "model")]
        return safepoint(folder, program=[*program, *options], HF_HOME=str(tmp_path / "home"))

    reference, output = tmp_path / "reference", tmp_path / "run"
    job = start(reference)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    job = start(output)
    with no_orphans(job):
        job.wait_for_step(3)
        os.kill(job.rank_pids()[0], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    job = start(output)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    name = "adapter_model.safetensors" if options else "model.safetensors"
    ours, theirs = (load_file(folder / "final" / name) for folder in (output, reference))
    assert same(dict(sorted(ours.items())), dict(sorted(theirs.items())))
    ours, theirs = (list_checkpoints(folder)[0] for folder in (output, reference))
    kept = sorted(path.name for path in theirs.glob("safepoint_kept_*"))
    assert kept
    for file in kept:
        assert same(*(torch.load(folder / file, weights_only=True) for folder in (ours, theirs)))
    assert log_of(output) == log_of(reference)
