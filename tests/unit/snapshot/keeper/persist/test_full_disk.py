"""A disk or a quota that is full while the keeper writes: older checkpoints give way, and the save is repeated."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.manifest import ManifestFacts, Trigger
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.working_checkpoint import RankPart, WorkingCheckpoint
from safepoint.foundation.events.space_events import Thinned
from safepoint.foundation.events.stream import Event
from safepoint.snapshot.keeper.persist import snapshot_commit
from safepoint.snapshot.keeper.persist.snapshot_commit import commit_snapshot
from safepoint.snapshot.keeper.snapshot_registry import Snapshot
from safepoint.snapshot.protocol.messages import CheckpointFacts
from tests.support.checkpoints import commit, describe, prepared

FACTS = ManifestFacts(
    run_id="run",
    attempt=1,
    step=9,
    epoch=0.9,
    world_size=1,
    global_batch=8,
    gradient_accumulation=1,
    samples_seen=72,
    strategy="single",
)


class Scene:
    """Checkpoints of the steps 1 to 4, and a snapshot of step 9."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, keep: str | None, num_nodes: int = 1
    ) -> None:
        self.output = prepared(folder)
        for step in range(1, 5):
            commit(self.output, step)
        self.events: list[Event] = []
        self.num_writes = 0
        self.failures: list[OSError] = []
        self._facts = CheckpointFacts(
            manifest=FACTS, folder=str(folder), attempt_id="attempt", keep=keep, save=7, num_nodes=num_nodes
        )
        monkeypatch.setattr(snapshot_commit, "_write", self._write)

    def _write(self, working: WorkingCheckpoint, snapshot: Snapshot, sources: Any) -> RankPart:
        """In place of the keeper's: writes a file, or a part of it and fails."""
        self.num_writes += 1
        root = working.rank_root(0)
        (root / working.name / "model.bin").write_bytes(b"model")
        if self.failures:
            raise self.failures.pop(0)
        return working.seal(0)

    def save(self) -> list[int]:
        """Returns the steps that were deleted because there was no room."""
        snapshot = Snapshot(step=9, num_ranks=1, facts=self._facts, trigger=Trigger.PERIODIC)
        commit_snapshot(snapshot, {}, self.events.append, lambda: True)
        return [event.step for event in self.events if isinstance(event, Thinned)]


def full(code: int = errno.ENOSPC) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_an_older_one_gives_way(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each try, the oldest first; what was written of the failed tries is gone."""
    scene = Scene(tmp_path / "out", monkeypatch, keep="newest=9")
    scene.failures = [full(code), full(code)]
    assert scene.save() == [1, 2]
    assert scene.num_writes == 3
    assert scene.output.steps() == [9, 4, 3]
    assert verify(scene.output.root / "checkpoint-9").is_valid
    assert list(scene.output.work.iterdir()) in ([], [scene.output.work / "attempt"])


def test_the_newest_one_never_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails at last, and the last good checkpoint is there."""
    scene = Scene(tmp_path / "out", monkeypatch, keep="newest=9")
    scene.failures = [full() for _ in range(9)]
    with pytest.raises(OSError, match="No space left"):
        scene.save()
    assert scene.num_writes == 4
    assert scene.output.steps() == [4]
    assert verify(scene.output.root / "checkpoint-4").is_valid


@pytest.mark.parametrize(
    ("keep", "make", "num_nodes"),
    [(None, full, 1), ("newest=9", lambda: full(errno.EIO), 1), ("newest=9", full, 2)],
    ids=["no policy", "another error", "several nodes"],
)
def test_otherwise_the_save_fails_at_once(
    keep: str | None,
    make: Callable[[], OSError],
    num_nodes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is deleted."""
    scene = Scene(tmp_path / "out", monkeypatch, keep=keep, num_nodes=num_nodes)
    scene.failures = [make()]
    with pytest.raises(OSError, match=r"No space left|Input/output"):
        scene.save()
    assert scene.num_writes == 1
    assert scene.output.steps() == [4, 3, 2, 1]


def test_the_checkpoints_of_another_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path / "out", monkeypatch, keep="newest=9")
    monkeypatch.setattr(snapshot_commit, "describe", lambda snapshot, files: describe(9)(files))
    scene._facts = CheckpointFacts(  # the run that saves is not the one of the checkpoints
        manifest=ManifestFacts(**{**{name: getattr(FACTS, name) for name in FACTS.__slots__}, "run_id": "another"}),
        folder=str(tmp_path / "out"),
        attempt_id="attempt",
        keep="newest=1",
        save=7,
    )
    scene.failures = [full()]
    with pytest.raises(OSError, match="No space left"):
        scene.save()
    assert scene.output.steps() == [4, 3, 2, 1]
    assert scene.events == []
