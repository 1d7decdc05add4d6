"""The newest checkpoint has right digests, and files that no framework can load.

A start would choose it, and end with exit code 14 while the framework loads it, although an older checkpoint is good.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_STEP
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.loading import ForbiddenNameError
from safepoint.cli.commands.checkpoints import app
from safepoint.errors import CheckpointError, ManifestError, NothingValidError, SafepointError
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.integrations.transformers.resume.trainer_state import contradiction_in
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import Examine
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared, sealed
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
_TENSOR = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
_WEIGHTS = len(_TENSOR).to_bytes(8, "little") + _TENSOR + b"w"
_STATE = {"global_step": 10, "max_steps": 90, "train_batch_size": 8, "log_history": []}


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    return prepared(tmp_path / "out")


def _resume(
    output: OutputFolder, examine: Callable[[Any], Examine] = lambda peers: lambda point: "", **options: Any
) -> tuple[list[Any], list[CheckpointRejected]]:
    """Start on two ranks; returns what each rank resumes from, or its error, and what was passed over."""
    events: list[Event] = []

    def one(peers: Any) -> int | None:
        settings, is_first = RunSettings(**options), peers.place.is_first
        folders = Folders(is_owner=is_first, owner_of=dict.fromkeys(range(2), 0))
        first = FirstStart(peers, output, None, settings)
        report = events.append if is_first else lambda event: None
        chooser = CheckpointChooser(peers, output, folders, None, settings, first, report, examine=examine(peers))
        point = chooser.choose()
        return None if point is None else point.manifest.step

    found = run_ranks(2, one)
    return found, [event for event in events if isinstance(event, CheckpointRejected)]


def _shards(folder: Path, change: Callable[[Any], Any] = lambda found: None) -> dict[str, bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    save({"weight": torch.ones(64), "other": torch.ones(64), "text": "a"}, checkpoint_id=folder)
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(found) or found))
    return {f"sharded/{one.name}": one.read_bytes() for one in folder.iterdir()}


def _twice(found: Any) -> None:
    found.state_dict_metadata["weight"].chunks *= 2


def _too_short(found: Any) -> None:
    found.state_dict_metadata["weight"].size = torch.Size([65])


def _at_one_place(found: Any) -> None:
    places = found.storage_data
    places[MetadataIndex("weight", torch.Size([0]))] = places[MetadataIndex("other", torch.Size([0]))]


def _after_the_end(found: Any) -> None:
    max(found.storage_data.values(), key=lambda place: place.offset).length += 1 << 40


def _nowhere(found: Any) -> None:
    del found.storage_data[MetadataIndex("weight", torch.Size([0]))]


def _text_nowhere(found: Any) -> None:
    del found.storage_data[MetadataIndex("text")]


def _in_a_missing_file(found: Any) -> None:
    found.storage_data[MetadataIndex("weight", torch.Size([0]))].relative_path = "__7_0.distcp"


def _outside(found: Any) -> None:
    found.storage_data[MetadataIndex("weight", torch.Size([0]))].relative_path = "../../x"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_twice, "do not make the whole tensor"),
        (_too_short, "do not make the whole tensor"),
        (_at_one_place, "overlap"),
        (_after_the_end, "after the end of this file"),
        (_nowhere, "does not say where 'weight' is"),
        (_text_nowhere, "does not say where 'text' is"),
        (_in_a_missing_file, "which is missing"),
        (_outside, "it names the file '../../x'"),
        (lambda found: 5, "does not describe a checkpoint"),
    ],
)
def test_metadata_of_shards(output: OutputFolder, change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    """All ranks resume from the checkpoint before. The event names the checkpoint and the reason."""
    commit(output, 10, {0: _shards(tmp_path / "shards")})
    commit(output, 20, {0: _shards(tmp_path / "shards", change)})
    points, rejected = _resume(output)
    assert points == [10, 10]
    (event,) = rejected
    assert event.path.endswith("checkpoint-20")
    assert reason in event.reason
    assert ".metadata was not loaded" in event.reason
    assert output.steps() == [10]


def test_a_named_checkpoint_and_the_only_one(output: OutputFolder, tmp_path: Path) -> None:
    """`--resume` refuses it with the reason, and without another checkpoint the run ends with exit code 14."""
    folder = commit(output, 20, {0: _shards(tmp_path / "shards", _twice)})
    found, _ = _resume(output, resume=str(folder))
    assert {type(one) for one in found} == {CheckpointError}
    assert "checkpoint-20 cannot be used: " in str(found[0])
    found, _ = _resume(output)
    assert {type(one) for one in found} == {NothingValidError}
    assert output.steps() == [20]


def _calls(found: Any) -> Any:
    class Call:
        def __reduce__(self) -> Any:
            return print, ("called",)

    found.planner_data = Call()


def test_names_of_code_are_not_passed_over(output: OutputFolder, tmp_path: Path) -> None:
    """The class may be one of the user's own: the user allows it, or deletes the checkpoint."""
    commit(output, 10, {0: _shards(tmp_path / "shards")})
    commit(output, 20, {0: _shards(tmp_path / "shards", _calls)})
    found, _ = _resume(output)
    assert {type(one) for one in found} == {ForbiddenNameError}
    assert "names builtins.print, and loading it could run code" in str(found[0])
    assert output.steps() == [20, 10]


def test_usual_shards_are_taken(output: OutputFolder, tmp_path: Path) -> None:
    commit(output, 20, {0: _shards(tmp_path / "shards")})
    assert _resume(output) == ([20, 20], [])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("latest", b"../elsewhere"),
        ("config.json", b"[]"),
        ("config.json", b'{"transformers_version": "\\u001b[31m"}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}'),
        ("pytorch_model.bin.index.json", b"{}"),
    ],
)
def test_files_that_name_others(output: OutputFolder, file: str, content: bytes) -> None:
    commit(output, 10, {0: {"model.bin": b"weights"}})
    commit(output, 20, {0: {"model.bin": b"weights", file: content}})
    points, rejected = _resume(output)
    assert points == [10, 10]
    assert file in rejected[0].reason


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("trainer_state.json", b"{"),
        ("trainer_state.json", json.dumps({**_STATE, "global_step": 19}).encode()),
        ("trainer_state.json", json.dumps({**_STATE, "global_step": 20, "epoch": "x"}).encode()),
        ("model.safetensors", b"weights"),
        ("model.safetensors", _WEIGHTS + b"more"),
        ("model.safetensors.index.json", b'{"weight_map": {"b": "model.safetensors"}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2.safetensors"}}'),
        ("safepoint_state_0.pt", b"a state"),
        ("safepoint_state_1.pt", b"a state"),
    ],
)
def test_files_of_a_trainer(output: OutputFolder, file: str, content: bytes) -> None:
    """Also the file of one rank that cannot be loaded."""
    usual = {
        "model.safetensors": _WEIGHTS,
        "model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors"}}',
    }
    commit(output, 10, {0: {**usual, "trainer_state.json": json.dumps(_STATE).encode()}})
    commit(output, 20, {0: {**usual, file: content}})
    points, rejected = _resume(output, lambda peers: lambda point: contradiction_in(point, peers))
    assert points == [10, 10]
    assert file in rejected[0].reason


# ---- steps after which no step can be saved ----------------------------------------------------------------------


def _at_step(output: OutputFolder, step: int) -> None:
    """Make a checkpoint of step 20 one of `step`, as a person can who may write to the folder."""
    folder = commit(output, 20)
    record = json.loads((folder / MANIFEST_NAME).read_bytes())
    (folder / MANIFEST_NAME).write_bytes(sealed({**record, "step": step}))
    folder.rename(output.root / f"checkpoint-{step}")


@pytest.mark.parametrize("step", [MAX_STEP - 1, MAX_STEP, MAX_STEP + 1, 10**18 - 1, 1 << 63])
def test_highest_steps(output: OutputFolder, step: int) -> None:
    """A run passes the checkpoint over. Commands call it damaged if its manifest states a higher step than 10^15. A
    number of more than 18 digits is no name of a checkpoint."""
    commit(output, 10)
    _at_step(output, step)
    assert read_manifest(output.root / "checkpoint-10").step == 10
    if step > MAX_STEP:
        with pytest.raises(ManifestError, match=f"step {step} must be from 0 to {MAX_STEP}"):
            read_manifest(output.root / f"checkpoint-{step}")
    is_checkpoint = step < 10**18
    for command, text in (("list", "damaged"), ("verify", f"step {step} must be from 0 to {MAX_STEP}")):
        result = CliRunner().invoke(app, [command, str(output.root)])
        assert result.exception is None or isinstance(result.exception, SafepointError | SystemExit)
        assert (text in result.stdout) == (is_checkpoint and step > MAX_STEP)
    points, rejected = _resume(output)
    assert points == [10, 10]
    assert len(rejected) == int(is_checkpoint)
    assert all(str(step) in event.reason and str(MAX_STEP) in event.reason for event in rejected)
    assert output.steps() == [10]
