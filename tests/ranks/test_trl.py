"""TRL's own scripts, unchanged, under `safepoint run`: interrupted, resumed, and equal to an uninterrupted run."""

import functools
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.verify import verify
from tests.support.equality import same
from tests.support.ingredients import make_ingredients
from tests.support.jobs import Job, no_orphans, read_events, safepoint

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    make_ingredients(folder)
    return folder


@dataclass(frozen=True)
class Script:
    """One script of TRL.

    Args:
        name: in `trl.scripts`.
        data: the kind of rows that it reads.
        settings: beside those of all.
        generation: the one that it is interrupted in, of those that generate; None for the others.
        token_s: what each token of it takes.
        options: for `safepoint run`, when it is interrupted.
    """

    name: str
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    generation: int | None = None
    token_s: float = 0.05
    options: tuple[str, ...] = ()


_ONLINE = {"num_generations": 2, "max_completion_length": 8, "reward_funcs": "rewards.vowels", "num_train_epochs": 2}
# A generation is for two steps, twice: some of it is still to be trained on when the run is interrupted.
_REUSED = {**_ONLINE, "num_iterations": 2, "steps_per_generation": 4, "logging_steps": 3}
SCRIPTS = {
    # Averages between two log lines are part of the log that is compared. The last batch of an epoch is not full:
    # what fills it up is removed from what is gathered.
    "sft": Script("sft", "text", {"max_length": 64, "logging_steps": 7, "per_device_train_batch_size": 5}),
    "dpo": Script("dpo", "preferences", {"max_length": 64}),
    "dpo, the reference follows": Script(
        "dpo", "preferences", {"max_length": 64, "sync_ref_model": True, "ref_model_sync_steps": 2}
    ),
    "reward": Script("reward", "preferences", {"max_length": 64, "logging_strategy": "epoch"}),
    "kto": Script("kto", "judged", {"max_length": 64, "per_device_train_batch_size": 5}),
    "grpo": Script("grpo", "prompts", _ONLINE, generation=5),
    "rloo": Script("rloo", "prompts", _ONLINE, generation=5),
    "grpo, completions reused": Script("grpo", "prompts", _REUSED, generation=2),
    "rloo, completions reused": Script("rloo", "prompts", _REUSED, generation=2),
    "grpo, a generation longer than the grace period": Script(
        "grpo", "prompts", _ONLINE, generation=5, token_s=2, options=("--grace", "5", "--snapshot-steps", "1")
    ),
}


def program(case: str, ingredients: Path, output: Path, *, by_command: bool) -> list[str]:
    """The program of a case: `-m trl.scripts.sft …`, or the command `trl sft …`."""
    script = SCRIPTS[case]
    settings = {
        "model_name_or_path": ingredients / "model",
        "dataset_name": ingredients / script.data,
        "output_dir": output,
        "num_train_epochs": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "dtype": "float32",
        **script.settings,
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ["trl", script.name, *arguments] if by_command else ["-m", f"trl.scripts.{script.name}", *arguments]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.long if name != "sft" else []) for name in SCRIPTS]
)
def test_a_script_survives_an_interruption(case: str, ingredients: Path, tmp_path: Path) -> None:
    """SIGTERM to one rank: one checkpoint, exit code 75; the resumed run's model and log are equal.

    The uninterrupted run is started as a module. The interrupted run of SFT is started by TRL's command.
    """
    script = SCRIPTS[case]
    reference, output = tmp_path / "reference", tmp_path / "run"

    start = functools.partial(_start, case, ingredients, tmp_path)
    job = start(reference)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    job = start(output, *script.options, token_s=script.token_s, by_command=case == "sft")
    with no_orphans(job):
        job.wait_for_event("attempt_started")
        if script.generation is None:
            job.wait_for_step(3)
        else:
            job.wait_for_mark(f"generation {script.generation}", rank=1)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert not (output / "model.safetensors").exists(), "a half-trained model was saved as the final one"
    assert verify(list_checkpoints(output)[0]).is_valid
    job = start(output, by_command=case == "sft")
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert read_events(output, "resumed")
    assert_same_tensors(output, reference)
    assert log_of(output) == log_of(reference)
    before = load_file(ingredients / "model" / "model.safetensors")
    theirs = load_file(reference / "model.safetensors")
    assert any((before[key] != theirs[key]).any() for key in before if key in theirs), "nothing was trained"


def _start(
    case: str,
    ingredients: Path,
    work: Path,
    folder: Path,
    *options: str,
    token_s: float = 0,
    by_command: bool = False,
) -> Job:
    folder.mkdir(exist_ok=True)
    variables = {
        "HF_DATASETS_CACHE": str(work / "cache"),
        "HF_HOME": str(work / "home"),
        "PYTHONPATH": os.pathsep.join((str(ingredients), os.environ.get("PYTHONPATH", ""))),
        "MARKS": str(folder),
        "TOKEN_S": str(token_s),
    }
    words = program(case, ingredients, folder, by_command=by_command)
    return safepoint(folder, "--nproc-per-node", "2", *options, program=words, **variables)


@pytest.mark.long
@pytest.mark.parametrize("case", ["sft", "grpo"])
def test_copied_ranks_train_as_others(case: str, ingredients: Path, tmp_path: Path) -> None:
    """Ranks that are copied from a template, and replaced by further copies after a kill."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    job = _start(case, ingredients, tmp_path, reference)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    job = _start(case, ingredients, tmp_path, output, "--preload", "--save-steps", "1", token_s=0.05)
    with no_orphans(job):
        job.wait_for_event("saved", count=2)
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        assert job.wait(150) == 0, job.text
    assert [event["restart"] for event in read_events(output, "start_timed")] == [0, 1]
    assert "import everything by themselves" not in job.text
    assert_same_tensors(output, reference)
    assert log_of(output) == log_of(reference)


def assert_same_tensors(output: Path, reference: Path) -> None:
    """The final model and the optimizer's state at the end are equal."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, reference))
    assert all((ours[key] == theirs[key]).all() for key in theirs)
    ours, theirs = (
        torch.load(list_checkpoints(folder)[0] / "optimizer.pt", weights_only=True) for folder in (output, reference)
    )
    assert same(ours, theirs)


def log_of(output: Path) -> list[dict[str, Any]]:
    """What the trainer has logged, without times."""
    history = json.loads((list_checkpoints(output)[0] / "trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in entry.items() if not name.endswith("_time")} for entry in history]
