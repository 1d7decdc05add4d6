"""Every strategy of the Trainer, interrupted in every way, with all weights trained and with adapters.

`make test` runs a cut of the matrix, `make test-strategies` all of it.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from safepoint.training.compatibility.peft_releases import loses_adapters_under_fsdp1
from tests.support.adapters import assert_without_base
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.equality import logged
from tests.support.jobs import Job, committed_steps, environment, no_orphans, read_events, safepoint, tiny
from tests.support.moto_server import MotoServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STRATEGIES = ("single", "ddp", "fsdp", "fsdp-full", "fsdp1", "fsdp1-full", "zero1", "zero2", "zero3")
KINDS = ("full", "lora")
CASES = ("periodic", "signal", "rank killed", "copied rank killed", "everything killed", "object store")
_CUT = {
    ("fsdp", "lora", "signal"),
    ("fsdp-full", "full", "rank killed"),
    ("fsdp1", "full", "signal"),
    ("zero3", "full", "signal"),
}
_MATRIX = [
    pytest.param(strategy, kind, case, marks=[] if (strategy, kind, case) in _CUT else pytest.mark.long)
    for strategy in STRATEGIES
    for kind in KINDS
    for case in CASES
    if not (strategy.startswith("fsdp1") and kind == "lora" and loses_adapters_under_fsdp1())
]
_SAVES = ("--save-strategy", "steps", "--save-steps", "4")


def _program(output: Path, strategy: str, kind: str, *arguments: str) -> list[str]:
    given = () if strategy in {"single", "ddp"} else ("--strategy", strategy)
    # Not the folder whose model would be taken for the final one.
    return tiny(output, "--end", "end", *given, *(("--lora",) if kind == "lora" else ()), *arguments)


def _start(output: Path, strategy: str, kind: str, *arguments: str, options: tuple[str, ...] = (), **env: str) -> Job:
    ranks = ("--nproc-per-node", "1" if strategy == "single" else "2")
    if strategy.startswith("zero"):
        env |= deepspeed_variables()
    return safepoint(output, *ranks, *options, program=_program(output, strategy, kind, *arguments), **env)


def _end(job: Job, code: int = 0) -> None:
    with no_orphans(job):
        assert job.wait(120) == code, job.text


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output of an uninterrupted run; made once for each strategy and kind."""

    @functools.cache
    def make(strategy: str, kind: str) -> Path:
        output = tmp_path_factory.mktemp("reference") / f"{strategy}-{kind}"
        _end(_start(output, strategy, kind))
        return output

    return make


@pytest.mark.parametrize(("strategy", "kind", "case"), _MATRIX)
def test_interrupted_is_uninterrupted(
    strategy: str, kind: str, case: str, reference_of: Any, moto: MotoServer, tmp_path: Path
) -> None:
    """Weights, optimizer and every logged value equal those of the reference."""
    skip_without_deepspeed(strategy)
    reference: Path = reference_of(strategy, kind)
    output = tmp_path / "run"
    _INTERRUPT[case](output, strategy, kind, moto)
    for checkpoint in list_checkpoints(output):
        verdict = verify(checkpoint)
        assert verdict.is_valid, verdict.faults
    assert not read_events(output, "save_failed")
    assert_same_state(output, reference)
    if kind == "lora":
        assert_without_base(list_checkpoints(output)[0])


@pytest.mark.skipif(not loses_adapters_under_fsdp1(), reason="this release of PEFT saves adapters under FSDP1")
def test_adapters_that_peft_would_lose_are_refused(tmp_path: Path) -> None:
    """Before training, with the way out."""
    job = _start(tmp_path / "run", "fsdp1", "lora")
    _end(job, 2)
    assert "the script trains adapters under FSDP1" in job.text
    assert "training was not started" in job.text
    assert not list_checkpoints(tmp_path / "run")


def _periodic(output: Path, strategy: str, kind: str, _: MotoServer) -> None:
    job = _start(output, strategy, kind, *_SAVES)
    _end(job)
    last = 32 if strategy == "single" else 16  # a rank alone takes as many samples in a step as each of two
    saved = committed_steps(output)
    # On a busy machine a save may begin before the one before it is written, and replace it.
    replaced = {event["step"] for event in job.events("save_superseded")}
    assert sorted({*saved, *replaced}) == list(range(4, last + 1, 4))
    assert saved[-1] == last
    assert "synchronous" not in job.text
    for path in (output / f"checkpoint-{last}").rglob("*"):
        if path.suffix in {".pt", ".pth", ".bin"} and path.name != "training_args.bin":
            with zipfile.ZipFile(path) as archive:  # torch itself leaves a mark in each
                assert not any(name.endswith(".data/serialization_id") for name in archive.namelist()), path


def _signal(output: Path, strategy: str, kind: str, _: MotoServer) -> None:
    """Signal one rank, then the launcher half a second later, during the same step of 2 s."""
    job = _start(output, strategy, kind, "--step-ms", "1000", "--slow-from", "3")
    with no_orphans(job):
        job.wait_for_mark("train 3")
        pids = job.rank_pids()
        os.kill(pids[-1], signal.SIGTERM)
        time.sleep(0.5)
        if len(pids) > 1:
            assert job.process.poll() is None, "the second signal comes too late"
            job.signal()
        assert job.wait() == 75, job.text
    assert len(pids) == 1 or None in {event["rank"] for event in job.events("signal_received")}
    (interrupted,) = job.events("interrupted")
    assert interrupted["saved"]
    job = _start(output, strategy, kind)
    _end(job)
    assert [event["step"] for event in job.events("resumed")] == [interrupted["step"]]


def _rank_killed(output: Path, strategy: str, kind: str, _: MotoServer, options: tuple[str, ...] = ()) -> None:
    rank = "0" if strategy == "single" else "1"
    crash = ("--crash-step", "6", "--crash-rank", rank, "--step-ms", "30")
    job = _start(output, strategy, kind, *_SAVES, *crash, options=options)
    _end(job)
    assert len(job.events("attempt_started")) == 2
    resumed = job.events("resumed") + job.events("resumed_from_memory")
    assert resumed[-1]["step"] >= 4


def _copied_rank_killed(output: Path, strategy: str, kind: str, moto: MotoServer) -> None:
    """DeepSpeed is never imported before the ranks are born: each rank imports it by itself."""
    _rank_killed(output, strategy, kind, moto, options=("--preload",))
    assert "import everything by themselves" not in Path(f"{output}.log").read_text()


def _everything_killed(output: Path, strategy: str, kind: str, _: MotoServer) -> None:
    job = _start(output, strategy, kind, *_SAVES, "--step-ms", "60")
    with no_orphans(job):
        job.wait_for_event("saved", step=4)
        job.kill_everything()
    job = _start(output, strategy, kind, *_SAVES)
    _end(job)
    assert job.events("resumed")[-1]["step"] >= 4


def _object_store(output: Path, strategy: str, kind: str, moto: MotoServer) -> None:
    prefix = f"strategies-{uuid.uuid4().hex}"
    options = ("--output-dir", str(moto.location(prefix)), "--local-dir", str(output))
    job = _start(output, strategy, kind, "--step-ms", "60", options=options, **moto.variables)
    with no_orphans(job):
        job.wait_for_step(5)
        os.kill(job.rank_pids()[-1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    step = job.events("uploaded")[-1]["step"]
    shutil.rmtree(output)
    job = _start(output, strategy, kind, *_SAVES, options=options, **moto.variables)
    _end(job)
    assert [event["step"] for event in job.events("fetched")] == [step]
    final = output.parent / "final"
    store = moto.store(prefix)
    for item in store.list("final"):
        (final / item.key).parent.mkdir(parents=True, exist_ok=True)
        (final / item.key).write_bytes(store.read(item.key))
    _assert_can_be_loaded(final / "final", _weights_at_the_end(output, strategy, kind), kind)


def _weights_at_the_end(output: Path, strategy: str, kind: str) -> dict[str, torch.Tensor]:
    """The weights that the program has saved; under ZeRO those that DeepSpeed reads from the last checkpoint."""
    if strategy.startswith("fsdp"):
        return torch.load(output / "end" / "whole.pt", weights_only=False)["weights"]
    if strategy.startswith("zero"):
        return _by_deepspeed(output / "checkpoint-16")
    return load_file(output / "end" / ("adapter_model.safetensors" if kind == "lora" else "model.safetensors"))


def _assert_can_be_loaded(model: Path, theirs: dict[str, torch.Tensor], kind: str) -> None:
    """`from_pretrained` reads `final/`, and its weights are those at the end."""
    if kind == "lora":
        assert (model / "adapter_config.json").is_file()
        ours = load_file(model / "adapter_model.safetensors")
        assert ours
    else:
        found, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
        assert not report["missing_keys"]
        ours = found.state_dict()
    named = {name.replace(".default.", "."): tensor for name, tensor in theirs.items()}
    assert all(torch.equal(tensor, named[name]) for name, tensor in ours.items() if name in named)
    assert len(ours.keys() & named.keys()) >= len(ours) - 1  # tied weights have one name there


_INTERRUPT = {
    "periodic": _periodic,
    "signal": _signal,
    "rank killed": _rank_killed,
    "copied rank killed": _copied_rank_killed,
    "everything killed": _everything_killed,
    "object store": _object_store,
}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "zero1", "zero2", "zero3")],
)
def test_a_checkpoint_in_pieces_is_exported(strategy: str, moto: MotoServer, tmp_path: Path) -> None:
    """`safepoint checkpoints export` writes the same as the strategy's own tool, also from a store."""
    skip_without_deepspeed(strategy)
    output, model = tmp_path / "run", tmp_path / "model"
    _end(_start(output, strategy, "full", "--save-strategy", "steps", "--save-steps", "16"))
    checkpoint = output / "checkpoint-16"
    (checkpoint / "model.safetensors").unlink(missing_ok=True)  # the Trainer's own copy, under ZeRO-1 and 2
    foreign = tmp_path / "foreign"
    shutil.copytree(checkpoint, foreign)
    (foreign / "safepoint-manifest.json").unlink()
    for source, target in ((checkpoint, model), (foreign, tmp_path / "again")):
        if strategy in {"zero1", "zero2"} and source is checkpoint:
            continue
        _export(source, target)
    prefix = f"pieces-{uuid.uuid4().hex}"
    store = moto.store(prefix)
    for path in (path for path in foreign.rglob("*") if path.is_file()):
        store.upload(f"foreign/{path.relative_to(foreign)}", path)
    _export(moto.location(f"{prefix}/foreign"), moto.location(f"{prefix}/model"), **moto.variables)
    exported = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert {item.key[6:]: bytes(store.read(item.key)) for item in store.list("model")} == exported
    ours = load_file(tmp_path / "again" / "model.safetensors")
    if strategy == "fsdp":
        theirs = torch.load(output / "end" / "whole.pt", weights_only=False)["weights"]
    else:
        theirs = _by_deepspeed(foreign)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _export(source: object, target: object, **env: str) -> None:
    command = [sys.executable, "-m", "safepoint.cli.main", "checkpoints", "export", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(**env))
    assert done.returncode == 0, done.stderr


def _by_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    code = (
        "import sys, torch\n"
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read\n"
        "state = read(sys.argv[1])\n"
        "torch.save({name: tensor.contiguous() for name, tensor in state.items()}, sys.argv[2])"
    )
    target = folder.parent / "by-deepspeed.pt"
    subprocess.run(
        [sys.executable, "-c", code, str(folder), str(target)],
        check=True,
        env=environment(DS_ACCELERATOR="cpu", **deepspeed_variables()),
    )
    return torch.load(target, weights_only=True)


# ---- what is compared -------------------------------------------------------------------------------------------


def assert_same_state(output: Path, reference: Path) -> None:
    """All tensors and numbers at the end, and everything that was logged, are equal."""
    ours, theirs = ([_without_flos(entry) for entry in logged(folder, "end")] for folder in (output, reference))
    assert ours == theirs
    names = sorted(path.name for path in (reference / "end").glob("*") if path.suffix in {".pt", ".safetensors"})
    assert names
    for name in names:
        ours, theirs = (_load(folder / "end" / name) for folder in (output, reference))
        assert _equal(ours, theirs), f"{name} differs"


def _without_flos(entry: dict[str, Any]) -> dict[str, Any]:
    """Under ZeRO-3 the Trainer counts only the weights that are gathered at the time."""
    return {name: value for name, value in entry.items() if name != "total_flos"}


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=False)


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return not isinstance(theirs, int | float | str) or ours == theirs
