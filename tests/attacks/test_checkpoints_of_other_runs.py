"""Someone puts a whole checkpoint of another run, with a high step, beside the checkpoints of a run.

It must not cost the run a checkpoint of its own, and no start may continue the other run silently.
"""

import dataclasses
import os
import uuid
from pathlib import Path

import pytest
import torch

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints, newest_valid
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import Fault, read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.tools.copy import copy
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import NothingValidError
from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.jobs.local.newest_state import newest_checkpoint
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.checkpointer import Checkpointer
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from safepoint.training.start.start import agree_on_start
from tests.support.checkpoints import commit, prepared
from tests.support.contexts import rank_context
from tests.support.stores import FaultyStore

_POLICIES = ["newest=1", "newest=2", "best=1:eval_loss"]
_STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


def change(folder: Path, **fields: object) -> Path:
    """Change fields of a checkpoint's manifest, which stays valid."""
    manifest = dataclasses.replace(read_manifest(folder), **fields)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return folder


def plant(output: OutputFolder, step: int = 999, *, run_id: str = "other") -> Path:
    """The best checkpoint of another run."""
    return change(commit(output, step), run_id=run_id, metrics={"eval_loss": 0.0})


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


@pytest.mark.parametrize("is_same_run", [False, True])
@pytest.mark.parametrize("keep", _POLICIES)
def test_a_run_keeps_what_it_has_just_saved(keep: str, is_same_run: bool, tmp_path: Path) -> None:
    """The stranger's checkpoint appears in the middle of the run, and may even state the run's own id."""
    with Checkpointer(tmp_path, keep=keep) as run:
        state = {"model": torch.nn.Linear(2, 2)}
        for step in (1, 2, 3):
            path = run.save(state, step).wait()
            change(path, metrics={"eval_loss": 10.0 - step})
            if step == 1:
                run_id = read_manifest(path).run_id if is_same_run else "other"
                plant(OutputFolder(tmp_path), run_id=run_id)
        run.save(state, 4).wait()
    assert "checkpoint-4" in names(tmp_path)
    assert "checkpoint-999" in names(tmp_path)
    if not is_same_run:  # the policy counts the run's own ones, as if the stranger's were not there
        own = {"newest=1": ["checkpoint-4"], "newest=2": ["checkpoint-4", "checkpoint-3"]}
        assert names(tmp_path)[1:] == own.get(keep, ["checkpoint-4", "checkpoint-3"])


def _inventory(root: Path) -> Inventory:
    return Inventory(open_store(Location.of_folder(root)))


@pytest.mark.parametrize("keep", _POLICIES)
def test_the_command_counts_each_run_by_itself(keep: str, tmp_path: Path) -> None:
    """`prune` keeps of each run what the policy keeps of it."""
    output = prepared(tmp_path)
    for step in (2, 4, 6):
        change(commit(output, step), metrics={"eval_loss": 10.0 - step})
    plant(output, 998)
    plant(output)
    doomed = [item.name for item in _inventory(tmp_path).superseded(parse_policies(keep))]
    all_but_one = ["checkpoint-2", "checkpoint-4", "checkpoint-998"]
    assert doomed == (["checkpoint-2"] if keep == "newest=2" else all_but_one)


@pytest.mark.parametrize("keep", [*_POLICIES, "newest=1,best=1:eval_loss"])
def test_a_run_prunes_only_its_own_ones_in_a_store(keep: str, tmp_path: Path) -> None:
    """Checkpoints of another run, older and newer, stay, and cost this run none of its own."""
    output, store = prepared(tmp_path / "out"), FaultyStore(tmp_path / "store")
    other = prepared(tmp_path / "other")
    for step in (1, 998, 999):
        plant(other, step)
    copies = _inventory(tmp_path / "other")
    for step in (1, 998, 999):
        copy(copies, copies.item(checkpoint_name(step)), store.location)
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id=uuid.uuid4().hex, since="", host="here"))
    uploader = _uploader(output, remote, keep)
    for step in (10, 20, 30):
        change(commit(output, step), metrics={"eval_loss": 10.0 - step})
        while uploader.upload_next():
            pass
    steps = RemoteFolder(store).steps()
    assert [step for step in steps if step in {1, 998, 999}] == [999, 998, 1]
    assert [step for step in steps if step in {10, 20, 30}] == ([30, 20] if keep == "newest=2" else [30])


def _uploader(output: OutputFolder, remote: RemoteFolder, keep: str) -> Uploader:
    return Uploader(output, remote, policies=parse_policies(keep), report=lambda event: None, run_id="run")


# ---- the next start --------------------------------------------------------------------------------------------


def test_a_start_reports_another_run(tmp_path: Path) -> None:
    """The log and the events name both runs; the second start of the other run reports nothing."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    output.next_attempt("run", after=0)
    plant(output)
    assert _events_of_start(output) == ["resumed", "resumed_from_other_run"]
    assert _events_of_start(output) == ["resumed"]


def _events_of_start(output: OutputFolder) -> list[str]:
    events: list[Event] = []
    context = rank_context(reported=events, output_dir=str(output.root), snapshot_slots=0)
    start = agree_on_start(context, Peers(Place(), timeout_s=1), output, examine=lambda point: "")
    assert start.point is not None
    assert start.point.manifest.step == 999
    output.release(start.attempt.attempt_id)
    return [event.name for event in events]


def test_a_checkpointer_reports_another_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And it goes on as the run that it has loaded."""
    state = {"model": torch.nn.Linear(2, 2)}
    with Checkpointer(tmp_path) as first:
        path = first.save(state, 1).wait()
        run_id = read_manifest(path).run_id
    path.rename(tmp_path / "checkpoint-999")
    change(tmp_path / "checkpoint-999", step=999, run_id="other")
    with Checkpointer(tmp_path) as second:
        assert second.load(state) == 999
        assert read_manifest(second.save(state, 1000).wait()).run_id == "other"
    assert f"run other, but run {run_id[:8]}" in capfd.readouterr().err
    assert '"event": "resumed_from_other_run"' in (tmp_path / ".safepoint" / "events.jsonl").read_text()


# ---- another user in a sticky folder -----------------------------------------------------------------------------


def _sticky(root: Path, *, own: tuple[int, ...]) -> OutputFolder:
    output = prepared(root)
    for step in own:
        commit(output, step)
    os.chown(plant(output, run_id="run"), _STRANGER, _STRANGER)
    root.chmod(0o1777)
    return output


def _choose(output: OutputFolder, **options: object) -> tuple[ResumePoint | None, list[str]]:
    events: list[Event] = []
    peers, settings = Peers(Place(), timeout_s=1), RunSettings(**options)  # type: ignore[arg-type]
    first = FirstStart(peers, output, None, settings)
    point = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append).choose()
    return point, [event.name for event in events]


@as_root
def test_a_checkpoint_of_another_user_does_not_count(tmp_path: Path) -> None:
    """Neither for a start nor for retention; it is reported, and stays."""
    output = _sticky(tmp_path / "out", own=(10, 20))
    point, events = _choose(output)
    assert point is not None
    assert (point.manifest.step, events) == (20, ["checkpoint_rejected", "resumed"])
    rejected: list[tuple[Path, Fault]] = []
    newest = newest_valid(output.root, rejected=lambda path, fault: rejected.append((path, fault)))
    assert newest is not None
    assert newest[1].step == 20
    assert "another user" in str(rejected[0][1])
    prune(output, parse_policies("newest=1"), lambda event: None)
    assert output.steps() == [20]
    assert (output.root / "checkpoint-999").is_dir()


@as_root
def test_the_command_does_not_count_it_either(tmp_path: Path) -> None:
    """`prune` neither deletes it, nor takes it for one of those that are kept."""
    output = _sticky(tmp_path / "out", own=(10, 20, 30))
    assert [item.name for item in _inventory(output.root).superseded(parse_policies("newest=2"))] == ["checkpoint-10"]


@as_root
def test_only_checkpoints_of_another_user(tmp_path: Path) -> None:
    """No start begins at step 0 unless the user asks for it."""
    output = _sticky(tmp_path / "out", own=())
    with pytest.raises(NothingValidError, match="other users"):
        _choose(output)
    with pytest.raises(NothingValidError, match="other users"):
        newest_valid(output.root, rejected=lambda path, fault: None)
    assert _choose(output, from_scratch=True)[0] is None


@as_root
def test_ones_that_count(tmp_path: Path) -> None:
    """Those of the folder's owner, and those in a folder that only a user may write to."""
    output = _sticky(tmp_path / "out", own=(10,))
    os.chown(output.root, _STRANGER, _STRANGER)
    assert names(output.root) == ["checkpoint-999", "checkpoint-10"]
    os.chown(output.root, 0, 0)
    output.root.chmod(0o755)
    assert names(output.root) == ["checkpoint-999", "checkpoint-10"]


# ---- the uploader, and the newest state of a job -----------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_uploader_sends_the_checkpoints_of_its_run(is_whole: bool, tmp_path: Path) -> None:
    """Otherwise the stranger's would supersede all of them, and none would be in the store."""
    output, store = prepared(tmp_path / "out"), FaultyStore(prepared(tmp_path / "store").root)
    remote, events = RemoteFolder(store), list[Event]()
    remote.claim(Claim(run_id="run", attempt=1, attempt_id=uuid.uuid4().hex, since="", host="here"))
    uploader = Uploader(output, remote, policies=(), report=events.append, run_id="run")
    stranger = plant(output)
    if not is_whole:
        (stranger / "model.safetensors").unlink()
    for step in (20, 30):
        commit(output, step)
        while uploader.upload_next():
            pass
    assert remote.steps() == [30, 20]
    assert [event.name for event in events] == ["uploaded", "uploaded"]


def test_an_older_checkpoint_with_a_higher_step(tmp_path: Path) -> None:
    """It does not make a process image look newer than the newest checkpoint of the run."""
    output = prepared(tmp_path)
    change(commit(output, 100), created="2026-06-01T00:00:00.000Z")
    change(plant(output), created="2020-01-01T00:00:00.000Z")
    found = newest_checkpoint(_inventory(tmp_path))
    assert found is not None
    assert found.created_s == clock.parse_utc("2026-06-01T00:00:00.000Z")
