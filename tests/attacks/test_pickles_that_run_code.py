"""Checkpoints of a hostile owner, whose pickles call a function and whose digests are right: nothing is called."""

import contextlib
import functools
import io
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import safepoint as package
from safepoint.checkpoint.format.verify import verify
from safepoint.errors import CheckpointError, ExitCode
from safepoint.training.integrations.deepspeed.partitions import Partitions
from safepoint.training.state.data_only import load_data, only_data
from safepoint.training.state.plain_values import load_plain
from tests.support.checkpoints import commit, prepared, reseal
from tests.support.commands import safepoint as command_line
from tests.support.deepspeed import deepspeed_variables, skip_without_deepspeed
from tests.support.jobs import Job, committed_steps, environment, no_orphans, safepoint, tiny
from tests.support.pickles import Call, add_call, add_call_to_values
from tests.support.zero import random_states, write_zero

_DCP: Any = dcp
_PROGRAMS = Path(__file__).parent.parent / "programs"
_REASON = "could run code"
_STEP = 2
_SAVES = ("--save-strategy", "steps", "--save-steps", str(_STEP))


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """The folder that a call makes."""
    return tmp_path / "called"


def test_tensors_of_other_ranks_are_no_file_of_the_checkpoint(tmp_path: Path) -> None:
    """FSDP sends them in objects while a checkpoint is loaded; a file that names what loads them is refused."""
    sent = pickle.dumps({"step": torch.tensor(3.0)})
    with only_data(tmp_path):
        assert pickle.loads(sent) == {"step": torch.tensor(3.0)}
    content = io.BytesIO()
    torch.save(torch.tensor(3.0), content, _use_new_zipfile_serialization=False)
    torch.save({"called": Named(torch.storage._load_from_bytes, content.getvalue())}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="_load_from_bytes"), only_data(tmp_path):
        torch.load(tmp_path / "a.pt", weights_only=False)


class Named:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


# ---- what Safepoint reads itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("load", [load_data, load_plain])
def test_a_file_that_calls_is_refused(load: Callable[..., Any], is_zip: bool, called: Path, tmp_path: Path) -> None:
    torch.save({"called": Call(called)}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=_REASON) as refusal:
        load(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(refusal.value)
    assert ("names posix.mkdir" if is_zip else "the format of torch before 1.6") in str(refusal.value)
    assert not called.exists()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("pattern", ["*optim_states.pt", "*model_states.pt"])
def test_partitions_of_zero(stage: int, pattern: str, called: Path, tmp_path: Path) -> None:
    place = write_zero(tmp_path / "zero", random_states(), stage=stage, ranks=2)
    add_call(next(place.glob(pattern)), called)
    with pytest.raises(CheckpointError, match=r"os\.mkdir"):
        Partitions(tmp_path / "zero", ranks=2)
    assert not called.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["zero", "dcp", "session"])
def test_commands_call_nothing(layout: str, called: Path, tmp_path: Path) -> None:
    """Whatever they are asked to do with a checkpoint in which every pickle calls, also those that no one loads."""
    source = tmp_path / "source"
    if layout == "zero":
        write_zero(source, random_states(), stage=2, ranks=2)
    elif layout == "dcp":
        _DCP.save({"model": {"w": torch.ones(2)}, "lr": 0.5}, checkpoint_id=str(source))
        add_call_to_values(source, called)
    else:
        source.mkdir()
        torch.save({"w": torch.ones(2)}, source / "model.pt")
    for path in [*source.rglob("*.pt"), *source.rglob(".metadata"), source / "training_args.bin", source / "rng.pth"]:
        add_call(path, called)
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    output = prepared(tmp_path / "run")
    folder, other = (commit(output, step, {0: files}) for step in (4, 8))
    for command, *more in (
        ("list",), ("show",), ("verify",), ("diff", other), ("export", tmp_path / "model"),
        ("copy", tmp_path / "copy"), ("repair",),
    ):  # fmt: skip
        outcome = command_line(
            "checkpoints", command, output.root if command in {"list", "repair"} else folder, *more
        )
        assert outcome.code in set(ExitCode), outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert not called.exists(), command


# ---- what frameworks read ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_data_only(called: Path, tmp_path: Path) -> None:
    """Of its metadata and of its values; what the script allows is loaded."""
    state: dict[str, Any] = {"w": torch.ones(3), "lr": 0.5, "names": ["a"]}
    folder = tmp_path / "good"
    _DCP.save(state, checkpoint_id=str(folder))
    with only_data(folder):
        _DCP.load(state, checkpoint_id=str(folder))
    assert state["lr"] == 0.5
    for attack in (
        lambda place: add_call(place / ".metadata", called),
        lambda place: add_call_to_values(place, called),
    ):
        bad = tmp_path / "bad"
        shutil.copytree(folder, bad)
        attack(bad)
        with pytest.raises(CheckpointError, match=_REASON), only_data(bad):
            _DCP.load(state, checkpoint_id=str(bad))
        assert not called.exists()
        with contextlib.suppress(BaseException):  # the attack works where nothing stops it
            _DCP.load(state, checkpoint_id=str(bad))
        called.rmdir()
        shutil.rmtree(bad)


def test_what_a_framework_hides_is_reported(called: Path, tmp_path: Path) -> None:
    """Accelerate ignores random numbers that it cannot load."""
    add_call(tmp_path / "random_states_0.pkl", called)
    with pytest.raises(CheckpointError, match=_REASON), only_data(tmp_path):
        with contextlib.suppress(Exception):
            torch.load(tmp_path / "random_states_0.pkl", weights_only=False)
    assert not called.exists()


def test_a_link_does_not_lead_out_of_the_checkpoint(called: Path, tmp_path: Path) -> None:
    add_call(tmp_path / "elsewhere.pt", called)
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "a.pt").symlink_to(tmp_path / "elsewhere.pt")
    (tmp_path / "alias").symlink_to(folder)
    for path in (folder / "a.pt", tmp_path / "alias" / "a.pt", folder / ".." / folder.name / "a.pt"):
        with pytest.raises(CheckpointError), only_data(folder):
            torch.load(path, weights_only=False)
    with (folder / "a.pt").open("rb") as file, pytest.raises(CheckpointError), only_data(folder):
        torch.load(file, weights_only=False)
    assert not called.exists()


class Own:
    """A class of the script."""


def test_the_script_decides_about_its_own(tmp_path: Path) -> None:
    """The classes that it allows, which stay allowed, also in its other files."""
    (tmp_path / "checkpoint-4").mkdir()
    torch.save(Own(), tmp_path / "own.pt")
    import numpy as np

    mine: list[Any] = [Own, np.ndarray]
    with torch.serialization.safe_globals(mine):
        for folder in (tmp_path, tmp_path / "checkpoint-4"):
            with only_data(folder):
                assert isinstance(torch.load(tmp_path / "own.pt", weights_only=False), Own)
        assert set(torch.serialization.get_safe_globals()) >= set(mine)
    assert isinstance(torch.load(tmp_path / "own.pt", weights_only=False), Own)  # nothing is left behind


_ACCELERATE = """
    import sys
    from pathlib import Path
    import torch
    from accelerate import Accelerator
    from safepoint.errors import CheckpointError
    from safepoint.foundation.environment import Place
    from safepoint.training.plain.state.accelerated_parts import AcceleratedParts
    class Counter:
        def state_dict(self): return {"count": 1}
        def load_state_dict(self, state): print("count", state["count"])
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer))
    accelerator.register_for_checkpointing(Counter())
    parts = AcceleratedParts(accelerator, Place())
    for folder in map(Path, sys.argv[1:]):
        if not folder.exists():
            folder.mkdir()
            parts.write(folder)
        try:
            parts.load(folder)
        except CheckpointError as error:
            print(folder.name, "refused", error)
"""


@pytest.mark.timeout(300)
def test_accelerate(called: Path, tmp_path: Path) -> None:
    """Each of its pickles; it loads those of registered objects without a restriction."""

    def load(*folders: Path) -> str:
        command = [sys.executable, "-c", textwrap.dedent(_ACCELERATE), *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    good = tmp_path / "good"
    assert "count 1" in load(good)
    pickles = sorted(path.name for path in good.iterdir() if path.suffix != ".safetensors")
    assert pickles == ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"]
    for name in pickles:
        shutil.copytree(good, tmp_path / name)
        add_call(tmp_path / name / name, called)
    said = load(*(tmp_path / name for name in pickles))
    assert not called.exists()
    assert [line.split()[:2] for line in said.splitlines() if "refused" in line] == [
        [name, "refused"] for name in pickles
    ]


# ---- whole runs --------------------------------------------------------------------------------------------------


def _trainer(output: Path, strategy: str = "") -> Job:
    skip_without_deepspeed(strategy)
    kind = ("--strategy", strategy) if strategy else ()
    program = tiny(output, "--end", "end", "--max-steps", "4", *kind)
    if not strategy.startswith("zero"):
        return safepoint(output, *_SAVES, program=program)
    return safepoint(output, *_SAVES, program=program, **deepspeed_variables())


def _session(output: Path, *_: str) -> Job:
    program = [str(_PROGRAMS / "shards.py"), "--kind", "fsdp", "--step-ms", "0", "--out", str(output)]
    return safepoint(output, "--nproc-per-node", "1", *_SAVES, program=program)


def _lightning(output: Path, *_: str) -> Job:
    return safepoint(output, *_SAVES, program=[str(_PROGRAMS / "lightning_loop.py"), "--out", str(output)])


_ATTACKS: dict[str, tuple[Callable[..., Job], str, str, str]] = {
    "the Trainer's optimizer": (_trainer, "", "optimizer.pt", ""),
    "the Trainer's scheduler": (_trainer, "", "scheduler.pt", ""),
    "the Trainer's rank": (_trainer, "", "safepoint_state_0.pt", ""),
    "FSDP's model": (_trainer, "fsdp", "pytorch_model_fsdp_0/.metadata", "fsdp"),
    "FSDP's optimizer": (_trainer, "fsdp", "optimizer_0/.metadata", "fsdp"),
    "FSDP's values": (_trainer, "fsdp", "optimizer_0", "fsdp"),
    "ZeRO's optimizer": (_trainer, "zero2", "global_step2/*_optim_states.pt", "zero2"),
    "ZeRO's model": (_trainer, "zero3", "global_step2/*_model_states.pt", "zero3"),
    "ZeRO's optimizer in another stage": (_trainer, "zero2", "global_step2/*_optim_states.pt", "zero3"),
    "ZeRO's model in another stage": (_trainer, "zero3", "global_step2/*_model_states.pt", "zero2"),
    "a session's shards": (_session, "", "sharded/.metadata", ""),
    "a session's part": (_session, "", "scheduler.pt", ""),
    "Lightning": (_lightning, "", "lightning.ckpt", ""),
}
"""How it is started, with which strategy; the file that calls; with which strategy it is resumed."""
_IN_TEST = {"ZeRO's optimizer in another stage", "a session's shards"}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of step 2; made once for each program."""

    @functools.cache
    def make(start: Callable[..., Job], strategy: str) -> Path:
        output = tmp_path_factory.mktemp("reference") / "run"
        job = start(output, *filter(None, [strategy]))
        with no_orphans(job):
            assert job.wait(200) == ExitCode.OK, job.text
        return output / f"checkpoint-{_STEP}"

    return make


@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=() if name in _IN_TEST else pytest.mark.long) for name in _ATTACKS]
)
def test_a_resume_calls_nothing(
    attack: str, checkpoint_of: Callable[..., Path], called: Path, tmp_path: Path
) -> None:
    """It ends with 14 and says which file names what."""
    start, before, pattern, after = _ATTACKS[attack]
    output = tmp_path / "run"
    folder = output / f"checkpoint-{_STEP}"
    shutil.copytree(checkpoint_of(start, before), folder)
    file = next(folder.glob(pattern))
    if file.is_dir():
        add_call_to_values(file, called)
    else:
        add_call(file, called)
    reseal(folder)
    assert verify(folder).is_valid
    job = start(output, *filter(None, [after]))
    with no_orphans(job):
        code = job.wait(200)
    assert not called.exists(), job.text
    assert code == ExitCode.NOTHING_VALID, job.text
    assert "was not loaded" in job.text
    assert committed_steps(output) == [_STEP]


# ---- whatever is added later -------------------------------------------------------------------------------------

_UNPICKLES = re.compile(
    r"weights_only=False|torch\.load\(|pickle\.loads?\(|Unpickler\b|allow_pickle|marshal\.|shelve\."
)
_KNOWN = {
    "training/state/data_only.py": "restricts",
    "checkpoint/pickles/bounded_pickle.py": "restricts",
    "checkpoint/pickles/restricted_load.py": "restricts",
    "checkpoint/pickles/torch_unpickler.py": "restricts",
    "checkpoint/weights/torch_file.py": "restricts",
    "training/collective/seal.py": "reads what a rank of the job has sealed",
    "training/integrations/lightning/lightning_parts.py": "does what the script says; restricts otherwise",
    "training/plain/data/fetches.py": "reads what a worker of this process has sent",
}


def test_nothing_else_unpickles() -> None:
    """Every module that can unpickle is in the table, with the reason why that is harmless."""
    root = Path(package.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(_UNPICKLES.search(line) for line in path.read_text().splitlines() if not line.lstrip().startswith('"'))
    }
    assert found == _KNOWN.keys()
