"""One function prunes a folder and a store."""

from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.pruning import CheckpointFolder, prune
from safepoint.checkpoint.local.retention import KeepNewest
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.foundation import files
from safepoint.foundation.events.run_events import Pruned, SaveFailed
from safepoint.foundation.events.stream import Event
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    output = prepared(tmp_path / "out")
    for step in (10, 20, 30, 40):
        commit(output, step)
    return output


@pytest.mark.parametrize("is_store", [False, True])
def test_what_no_policy_keeps_is_deleted_and_reported(output: OutputFolder, is_store: bool) -> None:
    """Protected steps stay; each deletion is one event, with its place."""
    folder: CheckpointFolder = RemoteFolder(FaultyStore(output.root)) if is_store else output
    events: list[Event] = []
    prune(folder, [KeepNewest(2)], events.append, protected=[20])
    assert folder.steps() == [40, 20]
    assert [(event.step, event.path) for event in events if isinstance(event, Pruned)] == [
        (step, folder.where(f"checkpoint-{step}")) for step in (10, 30)
    ]
    assert len(events) == 2


def test_a_disk_that_refuses_is_reported(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception; the next call tries again, and skips what a process is reading."""
    events: list[Event] = []

    def refuse(path: Path, *, trash: Path) -> None:
        raise OSError("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(files, "discard", refuse)
        prune(output, [KeepNewest(2)], events.append)
    assert [(event.step, event.trigger) for event in events if isinstance(event, SaveFailed)] == [(40, "retention")]
    assert output.steps() == [40, 30, 20, 10]
    with files.reading(output.root / "checkpoint-10" / MANIFEST_NAME):
        prune(output, [KeepNewest(2)], events.append)
    assert output.steps() == [40, 30, 10]


def test_a_disk_that_fails_altogether_is_reported(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception either when the folder cannot be listed: it would end one rank while the others wait for it."""
    events: list[Event] = []

    def fail(*_: object) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "manifests", fail)
        prune(output, [KeepNewest(2)], events.append)
    assert [event.trigger for event in events if isinstance(event, SaveFailed)] == ["retention"]
    assert output.steps() == [40, 30, 20, 10]
