"""One checkpoint, or a leftover of an ended run, can be neither moved nor deleted.

It may be an immutable folder, a mount point, a folder of another user in a sticky folder, or a folder of a lower
layer of an overlay. Nothing else may depend on it: other checkpoints are pruned, a start uses an older one, and the
stuck one does not count any more.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import KeepNewest, prune
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.tools.adopt import adopt
from safepoint.checkpoint.tools.inventory import open_inventory
from safepoint.checkpoint.tools.removal import remove_all
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import AccessDeniedError, StorageError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.foundation.shared_folders import no_links
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign
from tests.support.stores import FaultyStore, flip


class Stuck:
    """The names of folders that the kernel refuses to move or delete."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.errno = errno.EPERM
        real_rename, real_unlink, real_rmdir = os.rename, os.unlink, os.rmdir

        def refuse(path: Any, target: Path | None = None) -> None:
            if Path(path).name in self.names:
                raise OSError(self.errno, os.strerror(self.errno), str(path), None, target and str(target))

        def rename(path: Any, target: Any, **folders: int | None) -> None:
            refuse(path, Path(target))
            real_rename(path, target, **folders)

        def unlink(path: Any, *, dir_fd: int | None = None) -> None:
            refuse(path)
            real_unlink(path, dir_fd=dir_fd)

        def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
            refuse(path)
            real_rmdir(path, dir_fd=dir_fd)

        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "unlink", unlink)
        monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.fixture(params=[errno.EPERM, errno.EBUSY, errno.EXDEV])
def stuck(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stuck:
    found = Stuck(monkeypatch)
    found.errno = request.param
    return found


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    folder = prepared(tmp_path / "out")
    for step in (10, 20, 30, 40):
        commit(folder, step)
    return folder


def start(output: OutputFolder, **options: Any) -> tuple[ResumePoint | None, list[Event]]:
    events: list[Event] = []
    peers, settings = Peers(Place(), timeout_s=1), RunSettings(**options)
    first = FirstStart(peers, output, None, settings)
    point = CheckpointChooser(peers, output, Folders(), None, settings, first, events.append).choose()
    return point, events


def names(output: OutputFolder) -> list[str]:
    return [path.name for path in list_checkpoints(output.root)]


def test_retention_deletes_the_others(output: OutputFolder, stuck: Stuck) -> None:
    """The stuck one is the oldest, so it comes first in each save. It is reported once."""
    stuck.names = {"checkpoint-10"}
    events: list[Event] = []
    for _ in range(3):
        prune(output, [KeepNewest(2)], events.append)
    assert names(output) == ["checkpoint-40", "checkpoint-30", "checkpoint-10"]
    assert [event.name for event in events] == ["prune_failed", "pruned"]
    stuck.names = set()
    prune(output, [KeepNewest(2)], events.append)
    assert names(output) == ["checkpoint-40", "checkpoint-30"]


def test_retention_in_a_store(tmp_path: Path) -> None:
    """The keys may not delete the objects of one checkpoint."""

    def refuse(call: str, key: str) -> None:
        if call == "delete" and key.startswith("checkpoint-10/"):
            raise AccessDeniedError("DELETE: access denied")

    remote = RemoteFolder(FaultyStore(tmp_path, refuse))
    for step in (10, 20, 30):
        commit(prepared(tmp_path), step)
    remote.note_commit(30)
    events: list[Event] = []
    prune(remote, [KeepNewest(1)], events.append)
    assert remote.steps() == [30, 10]
    assert [event.name for event in events] == ["prune_failed", "pruned"]


def test_unfinished_objects_of_ended_attempts(tmp_path: Path) -> None:
    """A start deletes them. Those that may not be deleted stay, and the start goes on."""

    def refuse(call: str, key: str) -> None:
        if call == "delete" and key.startswith("checkpoint-10/"):
            raise AccessDeniedError("DELETE: access denied")

    remote = RemoteFolder(FaultyStore(tmp_path, refuse))
    remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="2026-01-01T00:00:00Z", host="here"))
    for name in ("checkpoint-10", "checkpoint-20"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
        remote.mark(name, {"model.safetensors": 1})
    remote.clean(keep=())
    assert (tmp_path / "checkpoint-10" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-20").exists()


def test_a_start_uses_an_older_one(output: OutputFolder, stuck: Stuck) -> None:
    """The newest one is damaged. It stays where it is, and the run begins with the next one."""
    flip(output.root / "checkpoint-40" / "model.safetensors")
    stuck.names = {"checkpoint-40"}
    point, events = start(output)
    assert point is not None
    assert point.manifest.step == 30
    reports = [str(event) for event in events if event.name == "checkpoint_rejected"]
    assert len(reports) == 2, "that it is damaged, and that it could not be moved"
    assert names(output)[0] == "checkpoint-40"
    assert output.passed_over() == [output.root / "checkpoint-40"]


def test_a_passed_over_one_displaces_no_other(output: OutputFolder, stuck: Stuck) -> None:
    """It has the highest step and the right sizes. If it counted, retention would delete all good ones for it."""
    flip(output.root / "checkpoint-40" / "model.safetensors")
    stuck.names = {"checkpoint-40"}
    start(output)
    commit(output, 35)
    prune(OutputFolder(output.root), [KeepNewest(1)], lambda event: None)
    assert names(output) == ["checkpoint-40", "checkpoint-35"]
    assert OutputFolder(output.root).steps() == [35]
    assert verify(output.root / "checkpoint-35").is_valid
    point, _ = start(output)
    assert point is not None
    assert point.manifest.step == 35


@pytest.mark.parametrize("option", ["resume", "from_scratch"])
def test_a_valid_one_that_the_user_passes_over(output: OutputFolder, stuck: Stuck, option: str) -> None:
    """With `--resume` or `--from-scratch`. Later starts continue the new run, not the stuck checkpoint."""
    stuck.names = {"checkpoint-40"}
    chosen: dict[str, Any] = (
        {"from_scratch": True} if option == "from_scratch" else {"resume": str(output.root / "checkpoint-20")}
    )
    start(output, **chosen)
    assert output.passed_over() == [output.root / "checkpoint-40"]
    commit(output, 21)
    point, _ = start(output)
    assert point is not None
    assert point.manifest.step == 21
    listed = open_inventory(str(output.root))[0]
    assert listed.item().name == "checkpoint-21", "commands take this one as the newest"


def test_a_new_one_under_the_same_name_counts(output: OutputFolder, stuck: Stuck) -> None:
    """The user has moved the stuck one away, and the run saves this step again."""
    flip(output.root / "checkpoint-40" / "model.safetensors")
    stuck.names = {"checkpoint-40"}
    start(output)
    stuck.names = set()
    (output.root / "checkpoint-40").rename(output.root / "mine")
    commit(output, 40, {0: {"model.safetensors": b"new"}})
    assert output.passed_over() == []
    assert output.steps()[0] == 40


def test_it_is_moved_aside_as_soon_as_that_is_possible(output: OutputFolder, stuck: Stuck) -> None:
    """Each start tries again."""
    flip(output.root / "checkpoint-40" / "model.safetensors")
    stuck.names = {"checkpoint-40"}
    start(output)
    stuck.names = set()
    start(output)
    assert "checkpoint-40" not in names(output)
    assert (output.control / "passed-over.json").read_text() == "{}", "nothing is noted any more"


@pytest.mark.parametrize("notes", ["", "[]", "{", '{"checkpoint-40": 1}', '{"../x": "", "checkpoint-40": "xxh3"}'])
def test_hostile_notes(output: OutputFolder, notes: str) -> None:
    """A note that does not fit a checkpoint changes nothing."""
    (output.control / "passed-over.json").write_text(notes)
    assert output.steps() == [40, 30, 20, 10]
    output.pass_over([output.root / "checkpoint-30"])
    assert output.steps() == [40, 20, 10]


def test_repair_moves_the_others(output: OutputFolder, stuck: Stuck) -> None:
    """And says which one stays."""
    for step in (10, 20):
        flip(output.root / f"checkpoint-{step}" / "model.safetensors")
    stuck.names = {"checkpoint-20"}
    inventory, _ = open_inventory(str(output.root))
    found = repair(inventory, deep=True, drop_damaged=True, dry_run=False, idle_s=0)
    assert [item.name for item, _ in found.failed] == ["checkpoint-20"]
    assert found.moved_to is not None
    assert os.listdir(found.moved_to) == ["checkpoint-10"]


def test_delete_with_checkpoints(output: OutputFolder, stuck: Stuck) -> None:
    """The others are deleted, and the message names the one that stays."""
    stuck.names = {"checkpoint-30"}
    inventory, _ = open_inventory(str(output.root))
    with pytest.raises(StorageError, match="checkpoint-30"):
        remove_all([inventory], str(output.root))
    assert names(output) == ["checkpoint-30"]


def test_leftovers_of_ended_runs(output: OutputFolder, stuck: Stuck) -> None:
    """A start deletes them, and those that cannot be deleted do not end it."""
    stuck.names = {"immutable", f"checkpoint-50.{'0' * 32}"}
    (output.work / "old").mkdir()
    (output.work / "old" / "immutable").write_text("x")
    (output.work / "immutable").write_text("x")
    (output.work / "other").mkdir()
    (output.trash / f"checkpoint-50.{'0' * 32}").mkdir()
    output.claim(wait_s=0, waiting=lambda who: None)
    try:
        output.clean()
    finally:
        output.release()
    assert sorted(os.listdir(output.work)) == ["immutable", "old"]


def test_a_copy_that_an_earlier_start_has_left(output: OutputFolder, stuck: Stuck) -> None:
    """A resume of the same step makes its copy under another name."""
    (output.root / "checkpoint-40" / "stray.bin").write_text("x")
    stuck.names = {"immutable"}
    left = output.work / "resume-checkpoint-40"
    left.mkdir()
    (left / "immutable").write_text("x")
    point, _ = start(output, resume=str(output.root / "checkpoint-40"))
    assert point is not None
    assert verify(point.path).is_valid
    assert not (point.path / "stray.bin").exists()


def test_adopt_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another program whose folder cannot be written keeps no other from being adopted."""
    for step in (4, 6):
        write_foreign(tmp_path, step)
    real = no_links.rename

    def rename(source: Path, target: Path, *, below: Path | None = None) -> None:
        if target.resolve() == tmp_path / "checkpoint-4" / MANIFEST_NAME:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))
        real(source, target, below=below)

    monkeypatch.setattr(no_links, "rename", rename)
    inventory, _ = open_inventory(str(tmp_path))
    done = adopt(inventory, inventory.items(), accumulation=1, dry_run=False, progress=lambda *_: None)
    assert [bool(one.faults) for one in done] == [True, False]
    assert (tmp_path / "checkpoint-6" / MANIFEST_NAME).exists()
