"""ZeRO on another number of ranks, or another stage: what is loaded equals what was saved, element by element.

Every run here trains without dropout, so that what follows the change can be compared, too; it starts with other
weights than the first one, so that what is not loaded differs.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.verify import verify
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.equality import logged, samples
from tests.support.jobs import Job, environment, no_orphans, safepoint, tiny, wait_until_gone

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400), pytest.mark.long]

STEP = 2
"""In the middle of the first of two epochs of three steps."""
_MICRO_BATCHES = 12
"""Of two samples in a step, over all ranks: each of 1, 2, 3 and 4 ranks has as many as the others."""
_BF16 = ("--settings", json.dumps({"bf16": True}))
_KINDS = {
    "full": ("--weight-decay", "0.1", "--frozen"),
    "lora": ("--lora",),
    "bf16": (*_BF16, "--weight-decay", "0.1"),
    "sums": (*_BF16, "--weight-decay", "0.1", "--zero-variant", "sums"),
    "offload": ("--weight-decay", "0.1", "--zero-variant", "offload"),
}
_PAIRS = [(before, after) for before in range(1, 5) for after in range(1, 5) if before != after]
_CASES = [
    *(("zero2", before, "zero2", after, "full") for before, after in _PAIRS),
    *(("zero3", before, "zero3", after, "full") for before, after in ((1, 4), (3, 2), (2, 3))),
    *(("zero1", before, "zero1", after, "full") for before, after in ((2, 3), (4, 1))),
    *((stage, 2, stage, 3, kind) for stage in ("zero1", "zero2", "zero3") for kind in ("lora", "bf16")),
    ("zero1", 2, "zero1", 3, "sums"),
    ("zero2", 2, "zero2", 1, "offload"),
    ("zero3", 1, "zero3", 2, "offload"),
    ("zero2", 2, "zero3", 3, "full"),
    ("zero3", 2, "zero2", 1, "full"),
    ("zero1", 2, "zero3", 2, "lora"),
    ("zero1", 2, "zero2", 2, "full"),
]


def start(output: Path, strategy: str, ranks: int, kind: str, *arguments: str, accumulation: int = 0) -> Job:
    program = tiny(
        output,
        *("--strategy", strategy, "--end", "end", "--samples", "72", "--epochs", "2", "--logging-steps", "1"),
        *("--dropout", "0", "--grad-accum", str(accumulation or _MICRO_BATCHES // ranks)),
        *("--tell-samples", "--tell-state", str(STEP), *_KINDS[kind], *arguments),
    )
    saves = ("--save-strategy", "steps", "--save-steps", str(STEP))
    return safepoint(
        output,
        "--nproc-per-node",
        str(ranks),
        *saves,
        program=program,
        **deepspeed_variables(),
        DS_ACCELERATOR="cpu",
    )


def end(job: Job, code: int = 0) -> None:
    with no_orphans(job):
        assert job.wait(200) == code, job.text


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The output of a run whose number of ranks does not change; made once."""

    @functools.cache
    def make(strategy: str, ranks: int, kind: str) -> Path:
        skip_without_deepspeed(strategy)
        output = tmp_path_factory.mktemp("reference") / f"{strategy}-{ranks}-{kind}"
        end(start(output, strategy, ranks, kind))
        return output

    return make


def interrupted(reference: Path, output: Path) -> Path:
    """The folder as if the run of `reference` had been killed soon after its first checkpoint."""
    output.mkdir()
    shutil.copytree(reference / f"checkpoint-{STEP}", output / f"checkpoint-{STEP}")
    return output


@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks_after", "kind"), _CASES)
def test_everything_goes_on(
    before: str, ranks_before: int, after: str, ranks_after: int, kind: str, reference_of: Any, tmp_path: Path
) -> None:
    """Weights, moments, learning rates, and the samples of each step equal those of a run without a change."""
    reference: Path = reference_of(before, ranks_before, kind)
    output = interrupted(reference, tmp_path / "run")
    # PEFT itself refuses adapters of another model.
    seed = "1" if kind == "lora" else "2"
    accumulation = _MICRO_BATCHES // ranks_before
    job = start(output, after, ranks_after, kind, "--model-seed", seed, accumulation=accumulation)
    end(job)
    assert_same_state(
        torch.load(output / "state-begin.pt", weights_only=False),
        torch.load(reference / f"state-{STEP}.pt", weights_only=False),
    )
    assert samples(output) == {step: seen for step, seen in samples(reference).items() if step >= STEP}
    assert_goes_on_alike(output, reference, tolerance=2e-2 if kind in {"bf16", "sums"} else 1e-4)
    event = job.events("repartitioned")[0]
    assert (event["step"], event["world_size_before"], event["world_size"]) == (STEP, ranks_before, ranks_after)
    assert (event["stage_before"], event["stage"]) == (before[-1], int(after[-1]))
    assert "copied into DeepSpeed's universal layout in" in job.text
    verdict = verify(output / f"checkpoint-{STEP}")
    assert verdict.is_valid, verdict.faults
    assert not list((output / ".safepoint" / "work").iterdir())


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All that ZeRO has split, the weights that are not trained, and the optimizer's groups are equal."""
    assert ours["trained"].keys() == theirs["trained"].keys()
    for name, states in theirs["trained"].items():
        assert states["exp_avg"].any(), f"{name} was not trained"
        for state, tensor in states.items():
            assert torch.equal(ours["trained"][name][state], tensor), f"{state} of {name} differs"
    assert ours["others"].keys() == theirs["others"].keys()
    for name, tensor in theirs["others"].items():
        assert torch.equal(ours["others"][name], tensor), f"{name} differs"
    assert ours["groups"] == theirs["groups"]
    assert set(ours["steps"]) == set(theirs["steps"]) == {STEP}


def assert_goes_on_alike(output: Path, reference: Path, *, tolerance: float) -> None:
    """Learning rates are equal; losses differ by rounding, because ranks add in another order."""
    ours, theirs = logged(output, "end"), logged(reference, "end")
    assert [entry.get("learning_rate") for entry in ours] == [entry.get("learning_rate") for entry in theirs]
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance), (mine, other)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=20 * tolerance), (mine, other)
    last, expected = (torch.load(one / "state-end.pt", weights_only=False) for one in (output, reference))
    assert set(last["steps"]) == set(expected["steps"])
    assert last["groups"] == expected["groups"]
    for name, states in expected["trained"].items():
        assert torch.allclose(last["trained"][name]["fp32"], states["fp32"], atol=tolerance), name
    assert last["batch"] == expected["batch"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_copy_is_what_deepspeeds_own_tool_makes(strategy: str, reference_of: Any, tmp_path: Path) -> None:
    """Every weight and every moment is equal."""
    checkpoint = reference_of(strategy, 3, "full") / f"checkpoint-{STEP}"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    code = (
        "import sys\nfrom pathlib import Path\nimport deepspeed\n"
        "from safepoint.training.integrations.deepspeed.partitions import Partitions\n"
        "from safepoint.training.integrations.deepspeed.universal import Universal\n"
        "partitions = Partitions(Path(sys.argv[1]), ranks=3)\n"
        "Universal(partitions, Path(sys.argv[2]), stage=partitions.stage).write(0, 1)\n"
    )
    name = f"global_step{STEP}"
    tool = ["--input_folder", str(checkpoint / name), "--output_folder", str(theirs / name)]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    theirs.mkdir()
    for command in (
        ["-c", code, str(checkpoint), str(ours)],
        ["-m", "deepspeed.checkpoint.ds_to_universal", *tool, *workers, "--inject_missing_state"],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            env=environment(DS_ACCELERATOR="cpu", **deepspeed_variables()),
        )
        assert done.returncode == 0, done.stderr
    states = ("fp32", "exp_avg", "exp_avg_sq")
    paths = [path.relative_to(ours) for state in states for path in ours.rglob(f"{state}.pt")]
    assert len(paths) == 14 * len(states)
    for path in paths:
        mine, other = (torch.load(root / path, weights_only=True) for root in (ours, theirs))
        other = other["param"] if isinstance(other, dict) else other
        assert torch.equal(mine["param"].flatten(), other.flatten()), path
    assert (ours / "latest_universal").read_text() == (theirs / "latest_universal").read_text()


def test_a_batch_that_cannot_be_kept_is_refused(reference_of: Any, tmp_path: Path) -> None:
    """It is refused with the reason, before anything is copied."""
    output = interrupted(reference_of("zero2", 2, "full"), tmp_path / "run")
    job = start(output, "zero2", 3, "full", "--batch-size", "5", accumulation=1)
    end(job, 11)
    assert "24 is not a multiple of 15" in job.text
    assert not job.events("repartitioned")
    assert verify(output / f"checkpoint-{STEP}").is_valid


def test_another_model_is_refused(reference_of: Any, tmp_path: Path) -> None:
    """The message names the weight that differs; nothing of the copy is left."""
    output = interrupted(reference_of("zero2", 2, "full"), tmp_path / "run")
    job = start(output, "zero2", 3, "full", "--hidden", "32", accumulation=6)
    end(job, 11)
    assert "and this run's is of shape (32, 32); training was not started" in job.text
    assert not list((output / ".safepoint" / "work").glob("universal-*"))


def test_a_kill_while_it_is_copied_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """The next start deletes the unfinished copy and continues."""
    skip_without_deepspeed("zero2")
    output, large = tmp_path / "run", ("--hidden", "512")
    end(start(output, "zero2", 2, "full", *large))
    for path in [*output.glob(f"checkpoint-[!{STEP}]"), output / "end", output / ".safepoint"]:
        shutil.rmtree(path)
    (output / f"state-{STEP}.pt").rename(tmp_path / "expected.pt")
    job = start(output, "zero2", 3, "full", *large, accumulation=6)
    copy = output / ".safepoint" / "work" / f"universal-checkpoint-{STEP}"
    with no_orphans(job):
        job.wait_for("a copy that is begun", lambda: list(copy.rglob("*.pt")), timeout_s=200)
        ranks = children(job.process.pid)  # the events name none yet
        assert len(ranks) >= 3
        for pid in [job.process.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)
        job.process.wait()
        wait_until_gone(ranks)
    assert copy.is_dir()
    assert not job.events("repartitioned")
    assert verify(output / f"checkpoint-{STEP}").is_valid
    end(start(output, "zero2", 3, "full", *large, accumulation=6))
    assert_same_state(
        torch.load(output / "state-begin.pt", weights_only=False),
        torch.load(tmp_path / "expected.pt", weights_only=False),
    )
    assert not copy.exists()


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` has started."""
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_best_model_of_other_ranks_is_loaded_at_the_end(strategy: str, tmp_path: Path) -> None:
    """The best checkpoint is verified, copied and loaded at the end."""
    skip_without_deepspeed(strategy)
    output = tmp_path / "run"
    best = ("--best", "--eval-strategy", "steps", "--eval-steps", str(STEP))
    end(start(output, strategy, 2, "full", *best))
    for path in [*output.glob(f"checkpoint-[!{STEP}]"), output / "end"]:
        shutil.rmtree(path)
    expected = torch.load(output / f"state-{STEP}.pt", weights_only=False)
    job = start(output, strategy, 3, "full", *best, accumulation=6)
    end(job)
    assert [event["step"] for event in job.events("repartitioned")] == [STEP, STEP]
    ours = torch.load(output / "state-end.pt", weights_only=False)
    assert_same_state(ours, expected)


@pytest.mark.parametrize("ranks_after", [1, 3])
def test_a_base_that_was_split_when_it_was_loaded(ranks_after: int, tmp_path: Path) -> None:
    """Its digest covers one rank's part; on other ranks that part is compared."""
    skip_without_deepspeed("zero3")
    output = tmp_path / "run"
    split = ("--split-at-load",)
    end(start(output, "zero3", 2, "lora", *split))
    for path in [*output.glob(f"checkpoint-[!{STEP}]"), output / "end"]:
        shutil.rmtree(path)
    job = start(output, "zero3", ranks_after, "lora", *split, "--model-seed", "2", accumulation=6)
    end(job, 11)
    assert "the weights differ" in job.text
    job = start(output, "zero3", ranks_after, "lora", *split, accumulation=6)
    end(job)
    assert_same_state(
        torch.load(output / "state-begin.pt", weights_only=False),
        torch.load(output / f"state-{STEP}.pt", weights_only=False),
    )
