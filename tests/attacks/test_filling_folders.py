"""A folder without room for the next save: what is deleted, what never is, and folders that do not state the truth.

Whole trainings on such a disk are in `tests/ranks/test_filling_disk.py`.
"""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import has_all_files, read_manifest
from safepoint.checkpoint.local import thinning
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import parse_policies
from safepoint.checkpoint.local.thinning import is_full, make_room, with_spare
from safepoint.errors import SaveError
from safepoint.foundation.events.space_events import SpaceLow, SpaceRegained, SpaceUnknown, Thinned
from safepoint.foundation.events.stream import Event
from safepoint.foundation.volumes.occupied import Occupied, occupied
from safepoint.foundation.volumes.room import Limit, Room
from safepoint.progress.record import read_space
from safepoint.training.launcher import space_watch
from safepoint.training.launcher.space_watch import SpaceWatch
from safepoint.training.outcome.watched_folder import WatchedFolder, share_watched_folder
from tests.support.checkpoints import commit, prepared

SAVE = Occupied(num_bytes=10_000, num_inodes=5)


class Disk:
    """A disk on which each checkpoint frees what it occupied."""

    def __init__(self, output: OutputFolder, *, short_of: int, limit: Limit = Limit.DISK) -> None:
        """Room for a save is there when `short_of` checkpoints are deleted."""
        self._output, self._limit = output, limit
        each = occupied([path for path, _ in output.manifests()][-1])
        needed = with_spare(SAVE).num_bytes
        self._free = needed - short_of * each.num_bytes
        self._before = occupied(output.root).num_bytes

    def room(self, folder: Path) -> Room:
        freed = self._before - occupied(self._output.root).num_bytes
        return Room(free_bytes=max(0, self._free + freed), limit=self._limit)


@pytest.fixture
def output(tmp_path: Path) -> OutputFolder:
    """Checkpoints of the steps 1 to 6."""
    output = prepared(tmp_path / "out")
    for step in range(1, 7):
        commit(output, step)
    return output


def thin(output: OutputFolder, disk: Disk, keep: str = "newest=6", **options: object) -> list[int]:
    events: list[Event] = []
    make_room(
        output,
        parse_policies(keep),
        events.append,
        save=SAVE,
        run_id="run",
        read_room=disk.room,
        **options,  # pyright: ignore[reportArgumentType]
    )
    return [event.step for event in events if isinstance(event, Thinned)]


def test_only_as_many_as_needed_and_the_oldest_first(output: OutputFolder) -> None:
    """Each deletion is reported with its reason."""
    assert thin(output, Disk(output, short_of=0)) == []
    assert thin(output, Disk(output, short_of=2)) == [1, 2]
    assert output.steps() == [6, 5, 4, 3]


def test_the_newest_always_stays(output: OutputFolder) -> None:
    assert thin(output, Disk(output, short_of=5)) == [1, 2, 3, 4, 5]
    assert output.steps() == [6]


def test_nothing_is_deleted_in_vain(output: OutputFolder) -> None:
    """If the save would not fit even without all older checkpoints, they stay."""
    assert thin(output, Disk(output, short_of=6)) == []
    assert thin(output, Disk(output, short_of=6), has_failed=True) == []
    assert len(output.steps()) == 6


def test_the_last_good_one_stays_beside_a_damaged_newest(output: OutputFolder) -> None:
    (output.root / "checkpoint-6" / "model.safetensors").unlink()
    assert thin(output, Disk(output, short_of=4)) == [1, 2, 3, 4]
    assert has_all_files(output.root / "checkpoint-5")


def test_what_was_asked_for_by_name_stays(output: OutputFolder) -> None:
    """`every`, `best` and the caller's protected steps; without a policy, everything."""
    assert thin(output, Disk(output, short_of=2), "newest=6,every=2") == [1, 3]
    assert thin(output, Disk(output, short_of=1), "newest=6,every=2", protected={5}) == []
    assert thin(output, Disk(output, short_of=1), "") == []
    assert thin(output, Disk(output, short_of=1), "younger=1h") == []
    assert output.steps() == [6, 5, 4, 2]


READER = """
import sys
from pathlib import Path
from safepoint.foundation.shared_folders.leases import reading
with reading(Path(sys.argv[1])):
    print("reads", flush=True)
    sys.stdin.read()
"""


def test_one_that_another_process_reads_stays(output: OutputFolder) -> None:
    path = output.root / "checkpoint-1" / MANIFEST_NAME
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        assert thin(output, Disk(output, short_of=1)) == [2]
        reader.communicate()


def test_another_runs_and_another_programs_stay(output: OutputFolder) -> None:
    """Also if this run has nothing left to delete."""
    for step in (1, 2, 3):
        path = output.root / f"checkpoint-{step}"
        manifest = replace(read_manifest(path), run_id="another")
        (path / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    (output.root / "checkpoint-4" / MANIFEST_NAME).unlink()
    assert thin(output, Disk(output, short_of=1)) == [5]
    assert thin(output, Disk(output, short_of=1)) == []
    assert sorted(path.name for path in output.root.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (1, 2, 3, 4, 6)
    ]


def test_space_that_is_freed_late(output: OutputFolder) -> None:
    """Some file systems report the space of deleted files later: not more is deleted because of that."""
    stale = Room(free_bytes=with_spare(SAVE).num_bytes - 1)
    events: list[Event] = []
    done = make_room(
        output, parse_policies("newest=6"), events.append, save=SAVE, run_id="run", read_room=lambda folder: stale
    )
    assert done == 1
    assert "are free" in events[0].line


def test_inodes(output: OutputFolder) -> None:
    rooms = iter([Room(free_bytes=1 << 40, free_inodes=with_spare(SAVE).num_inodes - 1), None])
    events: list[Event] = []
    make_room(
        output, parse_policies("newest=6"), events.append, save=SAVE, run_id="run", read_room=lambda _: next(rooms)
    )
    assert [event.line for event in events if "inodes" in event.line]


def test_a_quota_that_the_file_system_does_not_state(output: OutputFolder) -> None:
    """After a failed write one checkpoint is deleted, however much seems free."""
    plenty = Room(free_bytes=1 << 40)
    events: list[Event] = []
    options = {"save": SAVE, "run_id": "run", "read_room": lambda folder: plenty}
    assert make_room(output, parse_policies("newest=6"), events.append, **options) == 0
    assert make_room(output, parse_policies("newest=6"), events.append, **options, has_failed=True) == 1
    assert output.steps()[-1] == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_recognized_through_other_errors(code: int) -> None:
    error = SaveError("no")
    error.__cause__ = OSError(code, os.strerror(code))
    assert is_full(error)
    assert is_full(error.__cause__)
    assert not is_full(OSError(errno.EIO, "no"))
    assert not is_full(None)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_folder_that_cannot_be_measured(code: int, output: OutputFolder) -> None:
    """The save goes on, and nothing is deleted."""

    def refuse(folder: Path) -> Room:
        raise OSError(code, os.strerror(code))

    for read_room in (refuse, lambda folder: None):
        done = make_room(
            output, parse_policies("newest=1"), lambda event: None, save=SAVE, run_id="run", read_room=read_room
        )
        assert done == 0


@pytest.mark.parametrize("name", ["superseded", "is_in_use"])
def test_a_folder_that_cannot_be_listed(name: str, output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save goes on, and nothing is deleted."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = Disk(output, short_of=1)
    monkeypatch.setattr(output, name, refuse)
    assert thin(output, disk) == []


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """Ends what hangs when the test is over."""
    over = threading.Event()
    yield over
    over.set()


def test_a_folder_that_hangs(output: OutputFolder, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """As statvfs on NFS: the save waits for a moment, and nothing is deleted."""
    monkeypatch.setattr(thinning, "_LIMIT_S", 0.05)

    def read_room(folder: Path) -> Room | None:
        hanging.wait()
        return None

    done = make_room(
        output, parse_policies("newest=1"), lambda event: None, save=SAVE, run_id="run", read_room=read_room
    )
    assert done == 0


# ---- the launcher's watch -----------------------------------------------------------------------------------------


class Scene:
    """A launcher's folder, and an output folder that a rank has reported."""

    def __init__(
        self, folder: Path, output: OutputFolder, *, keep: str | None = "newest=6", is_owned: bool = True
    ) -> None:
        self.events: list[Event] = []
        self.folder = folder
        folder.mkdir()
        watched = WatchedFolder(
            folder=str(output.root),
            place="output folder",
            run_id="run",
            keep=keep,
            limit=None,
            expected_bytes=0,
            is_owned=is_owned,
        )
        share_watched_folder(str(folder), watched)
        self.watch = SpaceWatch(folder, self.events.append)

    def of(self, kind: type[Event]) -> Sequence[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_a_watch_warns_with_a_forecast(output: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; and it states how many checkpoints can be deleted."""
    needed = with_spare(occupied(output.root / "checkpoint-6")).num_bytes
    monkeypatch.setattr(space_watch, "room_of", lambda folder: Room(free_bytes=needed - 1))
    scene = Scene(tmp_path / "launcher", output)
    for _ in range(3):
        scene.watch.look()
    [low] = [event for event in scene.of(SpaceLow) if isinstance(event, SpaceLow) and event.place == "output folder"]
    assert (low.saves_left, low.num_deletable) == (0, 5)
    assert "has no room for the next save" in low.line
    assert "up to 5 older checkpoints will be deleted" in low.line


@pytest.mark.parametrize("answer", ["none", "error"])
def test_a_watch_of_a_folder_that_does_not_state_its_room(
    answer: str, output: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported once for each folder, and nothing else happens."""

    def read_room(folder: Path) -> Room | None:
        if answer == "error":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return None

    monkeypatch.setattr(space_watch, "room_of", read_room)
    scene = Scene(tmp_path / "launcher", output)
    for _ in range(3):
        scene.watch.look()
    assert [event.name for event in scene.events] == ["space_unknown"] * 2


def test_a_watch_of_a_folder_that_hangs(
    output: OutputFolder, tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread waits for the folder, however often the watch looks, and the other folder is still watched."""
    monkeypatch.setattr(space_watch, "_LIMIT_S", 0.05)
    calls: list[Path] = []

    def read_room(folder: Path) -> Room | None:
        if folder == output.root:
            calls.append(folder)
            hanging.wait()
        return Room(free_bytes=1 << 40)

    monkeypatch.setattr(space_watch, "room_of", read_room)
    scene = Scene(tmp_path / "launcher", output)
    for _ in range(20):
        scene.watch.look()
    assert calls == [output.root]
    [unknown] = scene.of(SpaceUnknown)
    assert "has not answered" in unknown.line
    assert (scene.folder / "space.json").exists()


def test_a_watch_of_free_space_that_jumps(
    output: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and no report at each jump."""
    free = iter([1 << 40, 0] * 100)
    monkeypatch.setattr(
        space_watch, "room_of", lambda folder: Room(free_bytes=next(free) if folder == output.root else 1 << 40)
    )
    scene = Scene(tmp_path / "launcher", output)
    for _ in range(40):
        scene.watch.look()
    assert len(scene.of(SpaceLow)) == 1
    assert scene.of(SpaceRegained) == []


def test_a_watch_on_a_node_that_only_shares_the_folder(
    output: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that manages the folder watches it, and no other; each node watches its temporary folder."""
    monkeypatch.setattr(space_watch, "room_of", lambda folder: Room(free_bytes=0))
    scene = Scene(tmp_path / "launcher", output, is_owned=False)
    for _ in range(2):
        scene.watch.look()
    [low] = scene.of(SpaceLow)
    assert f"the temporary folder {scene.folder} has no room for the next save" in low.line
    assert "training waits for saves" in low.line
    [record] = read_space(scene.folder / "space.json")
    assert (record.place, record.saves_left, record.is_low) == ("temporary folder", 0, True)


def test_a_watch_of_another_training_in_another_folder(
    output: OutputFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may train twice. Records that are not valid are ignored."""
    monkeypatch.setattr(space_watch, "room_of", lambda folder: Room(free_bytes=1 << 40))
    scene = Scene(tmp_path / "launcher", output)
    scene.watch.look()
    other = prepared(tmp_path / "other")
    Scene(tmp_path / "elsewhere", other)
    for text in ("nonsense", "{}", '{"folder": 3}'):
        (scene.folder / "watched.json").write_text(text)
        scene.watch.look()
        assert read_space(scene.folder / "space.json")[0].path == str(output.root)
    (tmp_path / "elsewhere" / "watched.json").rename(scene.folder / "watched.json")
    scene.watch.look()
    assert read_space(scene.folder / "space.json")[0].path == str(other.root)
