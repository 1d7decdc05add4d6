"""States with values of other kinds: negative positions, text in place of numbers, methods in place of settings.

A run must not train for ever, and must not end with a traceback that names no file.
"""

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from safepoint.checkpoint.format.manifest import UNKNOWN_DIGEST, FileEntry
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import CheckpointError, ConflictError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry
from safepoint.training.integrations.transformers.resume.state_fields import check_trainer_state
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LossTotals, RankState
from safepoint.training.plain.data.position import Position
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.start.copies import ResumePoint
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import describe, reseal
from tests.support.jobs import TINY, no_orphans, safepoint

# ---- positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1), ("epoch", -(10**9)), ("epoch", float("nan")), ("epoch", 2.0), ("epoch", True),
        ("epoch", 1 << 60),
        ("batches", -3), ("batches", "x"), ("batches", None), ("batches", 1 << 60), ("sampler", 5), ("fetched", []),
        ("epoch_rng", 3), ("generators", torch.zeros(3)), ("generators", [1]),
    ],
)  # fmt: skip
def test_a_position(name: str, value: Any) -> None:
    Position(**Position(epoch=3, batches=7).as_dict())
    with pytest.raises(ValueError, match=name):
        Position(**{**Position().as_dict(), name: value})


# ---- the Trainer -------------------------------------------------------------------------------------------------

_STATE = {
    "epoch": 0.5, "global_step": 4, "max_steps": 8, "logging_steps": 0.1, "eval_steps": 500, "save_steps": 2,
    "train_batch_size": 8, "num_train_epochs": 3, "num_input_tokens_seen": 0, "total_flos": 0.0,
    "log_history": [{"loss": float("nan"), "step": 2}], "best_metric": None, "best_model_checkpoint": None,
    "stateful_callbacks": {"TrainerControl": {"args": {"should_log": True}, "attributes": {}}, "A": [{"args": {}}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", "abc"), ("epoch", -1), ("epoch", float("nan")), ("epoch", float("inf")), ("global_step", 4.0),
        ("global_step", "4"), ("global_step", -4), ("max_steps", "x"), ("max_steps", None), ("log_history", 5),
        ("log_history", [1]), ("log_history", {}), ("stateful_callbacks", [1, 2]), ("stateful_callbacks", {"A": 5}),
        ("stateful_callbacks", {"A": {"attributes": [1]}}), ("num_input_tokens_seen", "x"), ("total_flos", "y"),
        ("best_metric", "abc"), ("best_model_checkpoint", 5), ("train_batch_size", -1), ("num_train_epochs", []),
        ("train_batch_size", None),
        ("is_local_process_zero", "no"), ("trial_params", "x"), ("compute_steps", 5), ("__class__", 5),
    ],
)  # fmt: skip
def test_the_state_of_a_trainer(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(_STATE))
    check_trainer_state(path, step=4)
    path.write_text(json.dumps({**_STATE, name: value}))
    with pytest.raises(CheckpointError, match=rf"trainer_state\.json .*{name}"):
        check_trainer_state(path, step=4)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("loss", "since_log", "x"), ("loss", "total", None), ("loss", "last_logged_step", -5),
        ("loss", "first_step", 0.5),
        ("pending", "evaluate", "yes"), ("pending", "learning_rate", "x"), ("", "elapsed_s", float("nan")),
        ("", "elapsed_s", "x"), ("", "epoch_rng", 5), ("", "rng", [1]), ("", "generators", {"a": 1}),
        ("", "asked_accumulation", -1), ("", "is_irregular", 2), ("", "generation", [1]),
    ],
)  # fmt: skip
def test_the_state_of_a_rank(part: str, name: str, value: Any, tmp_path: Path) -> None:
    state = RankState(
        loss=LossTotals(since_log=0.0, total=0.0, last_logged_step=0, first_step=0),
        pending=DeferredWork(),
        epoch_rng={},
        elapsed_s=0.0,
    )
    state.write(tmp_path, 0)
    path = tmp_path / "safepoint_state_0.pt"
    record = torch.load(path, weights_only=False)
    (record[part] if part else record)[name] = value
    torch.save(record, path)
    with pytest.raises(CheckpointError, match=r"safepoint_state_0\.pt is not the state of a rank"):
        RankState.read(tmp_path, rank=0, ranks_before=1, world_size=1)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None}, {"epoch": 1e300}, {"epoch": 1 << 62}, {"max_steps": 10**300}, {"max_steps": 1 << 62},
        {"max_steps": -5},
    ],
)  # fmt: skip
def test_a_position_in_a_stream(change: dict[str, Any], tmp_path: Path) -> None:
    """A run must not count as complete, and must not skip more steps than the checkpoint has."""
    (tmp_path / "trainer_state.json").write_text(json.dumps({**_STATE, **change}))
    manifest = describe(4)((FileEntry(path="a", size_bytes=0, digest=UNKNOWN_DIGEST),))
    manifest = dataclasses.replace(manifest, epoch=0.5)
    resume: Any = object.__new__(TrainerResume)
    resume._point = ResumePoint(path=tmp_path, manifest=manifest)
    resume._trainer = SimpleNamespace(args=SimpleNamespace(ignore_data_skip=False))
    resume.geometry = BatchGeometry(world_size=2, accumulation=2, global_batch=8, num_samples=None, drop_last=False)
    passes, micro_batches = resume._initial_position(lambda: None)
    assert passes == 0
    assert 0 <= micro_batches <= 4 * 2


# ---- schedulers --------------------------------------------------------------------------------------------------

_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=0.2),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def _scheduler(kind: str) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    return _SCHEDULERS[kind](optimizer)


def _rates(scheduler: Any, steps: int) -> list[float]:
    found: list[float] = []
    for _ in range(steps):
        scheduler.optimizer.step() if hasattr(scheduler, "optimizer") else scheduler._schedulers[0].optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        found += scheduler.get_last_lr()
    return found


def _load(scheduler: Any, state: Any, tmp_path: Path, *, by: str) -> None:
    torch.save(state, tmp_path / "scheduler.pt")
    if by == "a checkpointer":
        load_state(tmp_path, {"scheduler": scheduler})
    elif by == "a framework":
        with only_data(tmp_path, scheduler):
            scheduler.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    else:
        NamedParts({"scheduler": scheduler}, Place.from_environment({})).load(tmp_path)


@pytest.mark.parametrize("by", ["a framework", "a session", "a checkpointer"])
@pytest.mark.parametrize("kind", _SCHEDULERS)
def test_states_of_schedulers(kind: str, by: str, tmp_path: Path) -> None:
    """What a scheduler has saved is loaded, also a name that older releases of torch have saved."""
    before = _scheduler(kind)
    _rates(before, 3)
    after = _scheduler(kind)
    saved = copy.deepcopy(before.state_dict())
    _load(after, {**saved, "verbose": False}, tmp_path, by=by)
    assert "load_state_dict" not in vars(after)
    after.optimizer = before.optimizer if hasattr(before, "optimizer") else None
    assert {**after.state_dict(), "verbose": False} == {**before.state_dict(), "verbose": False}


@pytest.mark.parametrize("by", ["a framework", "a session", "a checkpointer"])
@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("cosine", "get_lr", 5), ("cosine", "step", 6), ("cosine", "optimizer", 7), ("cosine", "state_dict", 1),
        ("cosine", "load_state_dict", 1), ("cosine", "__class__", 1), ("cosine", "T_max", "x"),
        ("cosine", "base_lrs", 5),
        ("cosine", "base_lrs", [0.1, 0.1]), ("cosine", "base_lrs", ["x"]), ("cosine", "last_epoch", [1]),
        ("cosine", "last_epoch", torch.zeros(3)), ("cosine", 5, 1), ("plateau", "mode", 5), ("plateau", "best", "x"),
        ("steps", "milestones", 5), ("sequence", "_schedulers", [{}]), ("sequence", "_schedulers", 7),
        ("sequence", "_schedulers", [{}, {"get_lr": 5}]), ("sequence", "_milestones", ["x"]),
        ("lambda", "lr_lambdas", 5),
    ],
)  # fmt: skip
def test_other_states_of_schedulers(kind: str, name: Any, value: Any, by: str, tmp_path: Path) -> None:
    scheduler = _scheduler(kind)
    before = dict(vars(scheduler))
    with pytest.raises(CheckpointError, match=r"scheduler\.pt was not loaded"):
        _load(scheduler, {**scheduler.state_dict(), name: value}, tmp_path, by=by)
    assert vars(scheduler) == before


# ---- errors of frameworks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError, RuntimeError, ZeroDivisionError])
def test_an_error_names_the_file_that_was_read(error: type[Exception], tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "scheduler.bin")
    with pytest.raises(CheckpointError, match=r"scheduler\.bin could not be loaded: .*five"), only_data(tmp_path):
        _fail(tmp_path, error("five"))


def _fail(folder: Path, error: Exception) -> None:
    torch.load(folder / "scheduler.bin", weights_only=True)
    raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space"), MemoryError(), RuntimeError("CUDA error: no device"), ConflictError("others"),
        RuntimeError("[gloo] Connection closed by peer"),
        torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt(), SystemExit(3),
    ],
)  # fmt: skip
def test_errors_of_other_causes(error: BaseException) -> None:
    """A lost rank is no damaged checkpoint: the launcher starts the ranks again."""
    with pytest.raises(type(error)) as raised, states_of("a"):
        raise error
    assert raised.value is error


# ---- whole runs --------------------------------------------------------------------------------------------------

_LOOP = [str(TINY.parent / "loop.py"), "--epochs", "{}", "--step-ms", "1"]
_TINY = [str(TINY), "--max-steps", "{}", "--samples", "64"]


def _position(**changes: Any) -> Callable[[Any], Any]:
    return lambda content: {**content, "position": {**content["position"], **changes}}


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "file", "change"),
    [
        (_LOOP, "rank_0.pt", _position(epoch=-(10**9))),
        (_LOOP, "rank_0.pt", _position(epoch=10**9)),
        (_LOOP, "rank_0.pt", _position(evil=1)),
        (_TINY, "trainer_state.json", lambda content: {**content, "epoch": "abc"}),
        (_TINY, "scheduler.pt", lambda content: {**content, "get_lr": 5}),
        (_TINY, "optimizer.pt", lambda content: {**content, "param_groups": 5}),
    ],
)
def test_runs(program: list[str], file: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    """They end with exit code 14, name the file, and show no traceback."""
    output = tmp_path / "run"

    def start(count: str) -> Any:
        words = [program[0], "--out", str(output), *(word.format(count) for word in program[1:])]
        return safepoint(
            output, "--max-restarts", "0", "--save-strategy", "steps", "--save-steps", "2", program=words
        )

    is_loop = "--epochs" in program
    job = start("1" if is_loop else "4")
    with no_orphans(job):
        assert job.wait() == ExitCode.OK, job.text
    path = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])) / file
    if path.suffix == ".json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        torch.save(change(torch.load(path, weights_only=False)), path)
    reseal(path.parent)
    for older in set(output.glob("checkpoint-*")) - {path.parent}:
        shutil.rmtree(older)
    job = start("2" if is_loop else "8")
    with no_orphans(job):
        assert job.wait() == ExitCode.NOTHING_VALID, job.text
    assert path.name in job.text or path.parent.name in job.text
    assert "Traceback" not in job.text
