"""Adapters on a quantized model under each strategy, and beside a frozen reference; interrupted and resumed."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from safepoint.checkpoint.format.catalog import list_checkpoints
from tests.support.adapters import assert_without_base
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.equality import logged, same
from tests.support.ingredients import make_ingredients
from tests.support.jobs import TINY, Job, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]

_BITSANDBYTES = Path(sys.prefix) / "bitsandbytes"


def _start(output: Path, ingredients: Path, which: tuple[str, str], *, seed: int, step_ms: float = 0) -> Job:
    kind, strategy = which
    program = [str(TINY.parent / "adapters.py"), "--out", str(output), "--ingredients", str(ingredients)]
    program += ["--kind", kind, "--strategy", strategy, "--seed", str(seed), "--step-ms", str(step_ms)]
    variables = deepspeed_variables() if strategy.startswith("zero") else {}
    if kind == "qlora":
        path = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join((str(_BITSANDBYTES), path))
    return safepoint(output, "--nproc-per-node", "2", program=program, **variables)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("dpo", ""), *(("qlora", strategy) for strategy in ("", "fsdp", "zero1", "zero2", "zero3"))],
)
def test_adapters_survive_an_interruption(kind: str, strategy: str, tmp_path: Path) -> None:
    """No base weight is saved; the resumed run equals the reference; another base is refused."""
    if kind == "qlora" and not _BITSANDBYTES.is_dir():
        pytest.skip(f"bitsandbytes, which quantizes the model, is not in {_BITSANDBYTES}: run `make venv`")
    skip_without_deepspeed(strategy)
    which = kind, strategy
    ingredients, reference, output = (tmp_path / name for name in ("ingredients", "reference", "run"))
    ingredients.mkdir()
    make_ingredients(ingredients)
    job = _start(reference, ingredients, which, seed=1)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    job = _start(output, ingredients, which, seed=1, step_ms=50)
    with no_orphans(job):
        job.wait_for_event("attempt_started")
        job.wait_for_mark("train 4", rank=1)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    base = assert_without_base(list_checkpoints(output)[0])

    weights = ingredients / "model" / "model.safetensors"
    tensors = load_file(weights)
    before = weights.read_bytes()
    save_file(
        {name: tensor * (1.5 if "mlp" in name else 1) for name, tensor in tensors.items()}, weights, {"format": "pt"}
    )
    job = _start(output, ingredients, which, seed=2)
    with no_orphans(job):
        assert job.wait(150) == 11, job.text
    assert "the weights differ; training was not started" in job.text
    weights.write_bytes(before)

    # The adapters, and the frozen copy of DPO, begin with other random numbers: what counts is in the checkpoint.
    job = _start(output, ingredients, which, seed=2)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert read_events(output, "resumed")
    assert assert_without_base(list_checkpoints(output)[0]) == base
    assert assert_without_base(list_checkpoints(reference)[0]) == base
    assert logged(output) == logged(reference)
    files = sorted(path.relative_to(reference) for path in (reference / "final").rglob("*.safetensors"))
    assert len(files) == (0 if strategy else 2 if kind == "dpo" else 1)
    for file in files:
        assert same(load_file(output / file), load_file(reference / file)), file
    files = sorted(path.relative_to(reference) for path in (reference / "final").glob("*.pt"))
    assert files
    for file in files:
        assert same(*(torch.load(folder / file, weights_only=False) for folder in (output, reference))), file
