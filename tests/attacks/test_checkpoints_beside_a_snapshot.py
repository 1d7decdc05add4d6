"""Someone puts a checkpoint that is not valid, with a higher step, beside a run whose ranks are restarted.

The keeper still has a snapshot in memory that is newer than all valid checkpoints. The run must continue from it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation.environment import Place
from safepoint.foundation.events.run_events import CheckpointRejected, ResumedFromMemory
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared


def garbage(output: OutputFolder) -> None:
    folder = output.root / "checkpoint-999999"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text("{}")


def hollow(output: OutputFolder) -> None:
    """A manifest without its files."""
    for path in commit(output, 99).rglob("*"):
        if path.is_file() and path.name != MANIFEST_NAME:
            path.unlink()


def with_other_bytes(output: OutputFolder) -> None:
    path = commit(output, 99) / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))


Put = Callable[[OutputFolder], None]


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    found = prepared(tmp_path / "out")
    commit(found, 10)
    return found


@pytest.fixture
def snapshot(tmp_path: Path) -> ResumePoint:
    """A snapshot of step 20."""
    folder = commit(prepared(tmp_path / "memory"), 20)
    return ResumePoint(path=folder, manifest=read_manifest(folder))


def restart(output: OutputFolder, snapshot: ResumePoint) -> tuple[ResumePoint | None, list[Event]]:
    events: list[Event] = []
    peers, settings = Peers(Place(restart=1), timeout_s=1), RunSettings()
    first = FirstStart(peers, output, None, settings)
    assert output.claim(wait_s=0, waiting=lambda _: None)
    chooser = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append)
    try:
        return chooser.choose(snapshot), events
    finally:
        output.release()


@pytest.mark.parametrize("put", [garbage, hollow, with_other_bytes])
def test_the_snapshot_is_used(put: Put, output: OutputFolder, snapshot: ResumePoint) -> None:
    """The checkpoint is reported, and moved aside: a later save may need its name."""
    put(output)
    point, events = restart(output, snapshot)
    assert point is snapshot
    assert [type(event) for event in events if isinstance(event, CheckpointRejected | ResumedFromMemory)] == [
        CheckpointRejected,
        ResumedFromMemory,
    ]
    assert [path.name for path in output.checkpoints()] == ["checkpoint-10"]
    assert list(output.root.glob("set-aside-*/checkpoint-*"))


def test_a_valid_newer_checkpoint_is_used(output: OutputFolder, snapshot: ResumePoint) -> None:
    """A rank may have saved it without a snapshot."""
    commit(output, 30)
    point, _ = restart(output, snapshot)
    assert point is not None
    assert point.path.name == "checkpoint-30"


def test_older_checkpoints_are_not_read(output: OutputFolder, snapshot: ResumePoint) -> None:
    point, events = restart(output, snapshot)
    assert point is snapshot
    assert [type(event) for event in events] == [ResumedFromMemory]
