"""Adapters: on a quantized model, and beside a frozen copy of themselves; interrupted and resumed."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.catalog import list_checkpoints
from holdfast.checkpoint.verify import verify
from tests.support.equality import logged, same
from tests.support.ingredients import make_ingredients
from tests.support.jobs import TINY, Job, holdfast, no_orphans, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]

_BITSANDBYTES = Path(sys.prefix) / "bitsandbytes"


def _start(output: Path, ingredients: Path, kind: str, *, seed: int, step_ms: float = 0) -> Job:
    program = [str(TINY.parent / "adapters.py"), "--out", str(output), "--ingredients", str(ingredients)]
    program += ["--kind", kind, "--seed", str(seed), "--step-ms", str(step_ms)]
    path = os.pathsep.join((str(_BITSANDBYTES), os.environ.get("PYTHONPATH", "")))
    return holdfast(
        output, "--nproc-per-node", "2", program=program, **({"PYTHONPATH": path} if kind == "qlora" else {})
    )


@pytest.mark.parametrize("kind", ["qlora", "dpo"])
def test_adapters_survive_an_interruption(kind: str, tmp_path: Path) -> None:
    """Nothing of the model below is saved; the resumed run is the reference's; other weights below are refused."""
    if kind == "qlora" and not _BITSANDBYTES.is_dir():
        pytest.skip(f"bitsandbytes, which quantizes the model, is not in {_BITSANDBYTES}: run `make venv`")
    ingredients, reference, output = (tmp_path / name for name in ("ingredients", "reference", "run"))
    ingredients.mkdir()
    make_ingredients(ingredients)
    job = _start(reference, ingredients, kind, seed=1)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    job = _start(output, ingredients, kind, seed=1, step_ms=50)
    with no_orphans(job):
        job.wait_for_event("attempt_started")
        job.wait_for_mark("train 4", rank=1)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    base = _assert_adapters_only(list_checkpoints(output)[0])

    weights = ingredients / "model" / "model.safetensors"
    tensors = load_file(weights)
    before = weights.read_bytes()
    save_file(
        {name: tensor * (1.5 if "mlp" in name else 1) for name, tensor in tensors.items()}, weights, {"format": "pt"}
    )
    job = _start(output, ingredients, kind, seed=2)
    with no_orphans(job):
        assert job.wait(150) == 11, job.text
    assert "the weights differ; training was not started" in job.text
    weights.write_bytes(before)

    # The adapters, and the frozen copy of DPO, begin with other random numbers: what counts is in the checkpoint.
    job = _start(output, ingredients, kind, seed=2)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert read_events(output, "resumed")
    assert _assert_adapters_only(list_checkpoints(output)[0]) == base
    assert _assert_adapters_only(list_checkpoints(reference)[0]) == base
    assert logged(output) == logged(reference)
    files = sorted(path.relative_to(reference) for path in (reference / "final").rglob("*.safetensors"))
    assert len(files) == (2 if kind == "dpo" else 1)
    for file in files:
        assert same(load_file(output / file), load_file(reference / file)), file
    ours, theirs = (torch.load(folder / "final" / "optimizer.pt") for folder in (output, reference))
    assert same(ours, theirs)


def _assert_adapters_only(checkpoint: Path) -> dict[str, str]:
    """What the checkpoint says of the model below."""
    verdict = verify(checkpoint)
    assert verdict.is_valid, verdict.faults
    assert verdict.manifest is not None
    assert verdict.manifest.base is not None
    for path in checkpoint.rglob("*.safetensors"):
        assert path.name == "adapter_model.safetensors"
        assert all("lora_" in name for name in load_file(path))
    return dict(verdict.manifest.base)
