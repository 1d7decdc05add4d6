"""Another user of the folder puts links into it while a run waits for the lock, or works.

Nothing outside is deleted, written, or moved into a checkpoint.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.commit import link_or_copy
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import RankPart, replace_record
from safepoint.checkpoint.remote.fetch import create_files
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.remote.uploader_process import UploaderPlan
from safepoint.checkpoint.remote.verified_upload import upload_record
from safepoint.errors import SafepointError, StorageError
from safepoint.foundation import files
from safepoint.foundation.events.run_events import Pruned
from safepoint.foundation.events.stream import EventLog, append_lines
from safepoint.progress.file_writer import ProgressFile
from safepoint.snapshot.keeper.held_folder import HeldFolder, Reporter
from safepoint.snapshot.keeper.persist.file_writer import write_files
from safepoint.training.context import uploads
from tests.support.checkpoints import commit, describe, prepared, written
from tests.support.stores import FaultyStore

ENTRY = FileEntry(path="model.safetensors", size_bytes=3, digest=digest_bytes(b"new"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder outside."""
    home = tmp_path / "home"
    (home / "work" / "docs").mkdir(parents=True)
    (home / "work" / "docs" / "thesis").write_text("x")
    (home / "docs").mkdir()
    (home / "docs" / "thesis").write_text("x")
    return home


def _put_link(output: OutputFolder, name: str, home: Path) -> None:
    place = output.control if name == ".safepoint" else output.control / name
    shutil.rmtree(place)
    os.symlink(home, place)


@pytest.mark.parametrize("name", ["work", "trash"])
def test_while_a_run_waits(name: str, tmp_path: Path, home: Path) -> None:
    """The holder of the lock replaces a folder, then gives up the lock."""
    output = prepared(tmp_path / "out")
    held = files.FolderLock.acquire(output.control / "lock", {})
    assert held is not None

    def replace(_: str) -> None:
        _put_link(output, name, home)
        held.release()

    with pytest.raises(StorageError, match="link"):
        output.claim(wait_s=10, waiting=replace)
    second = OutputFolder(output.root)
    os.unlink(output.control / name)
    assert second.claim(wait_s=0, waiting=lambda who: None)  # the refused claim has left no lock
    second.release()
    assert (home / "docs" / "thesis").exists()


@pytest.mark.parametrize("name", ["work", "trash", ".safepoint"])
def test_after_the_claim(name: str, tmp_path: Path, home: Path) -> None:
    """Even then the leftovers of a link's target stay."""
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    _put_link(output, name, home)
    with pytest.raises(StorageError):
        output.clean()
    output.release()
    assert (home / "docs" / "thesis").exists()
    assert (home / "work" / "docs" / "thesis").exists()


# ---- a member of the group replaces folders while a run works -----------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    """Another run of the same user, with files of the same names; the same after the test."""
    folder = tmp_path / "other"
    output = prepared(folder)
    commit(output, 5)
    commit(output, 6)
    names = ("lock", "keeper", "events.jsonl", "progress.json", "attempt.json", "location", "upload.json")
    for name in (*names, "upload-notes.json", "upload-checkpoint-9.json"):
        (output.control / name).write_text("of the other run")
        (folder / name).write_text("of the other run")
    working = written(output, 7)
    (working.rank_root(0) / working.name / "model.safetensors").write_text("of the other run")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def swap(place: Path, target: Path) -> None:
    """What needs only the right to write to the folder in which `place` is."""
    place.rename(place.with_name("moved-away"))
    place.symlink_to(target)


def try_to(use: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, SafepointError):
        use()


def control_of(target: Path) -> tuple[Path, Path]:
    """Both a folder with Safepoint's names, and one with such files of any program."""
    return target, target / ".safepoint"


@pytest.mark.parametrize("is_control", [False, True])
def test_files_that_are_written_during_the_run(
    is_control: bool, tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress, events, the number of the attempt, locks, notes; and what is deleted: records of uploads."""
    monkeypatch.setattr(uploads, "_start", lambda plan: None)
    output = prepared(tmp_path / "out")
    assert output.claim(wait_s=0, waiting=lambda who: None)
    swap(output.control, control_of(other)[is_control])
    append_lines(output.events, b"{}\n")
    EventLog(output.events, actor="rank 0").write(Pruned(step=1, path="x"))
    progress = ProgressFile([output.progress], lambda: b"{}")
    progress.update()
    assert progress.flush(30)
    progress.close()
    second = OutputFolder(output.root)
    uses: list[Callable[[], object]] = [
        lambda: output.next_attempt("run", after=0),
        lambda: output.open_attempt("new"),
        lambda: output.pass_over([output.root / "checkpoint-1"]),
        lambda: files.FolderLock.acquire(output.keeper_lock, {"pid": 1}),
        lambda: second.claim(wait_s=0, waiting=lambda who: None),
        lambda: HeldFolder(Reporter(0, None)).open(output.root, is_committer=True),
        lambda: upload_record(output, "checkpoint-1").add(ENTRY, "1"),
        lambda: _uploader(output)._remove_old_records(),
        lambda: uploads.Uploader(UploaderPlan(folder=str(output.root), location="", attempt_id="run-1")),
        output.prepare,
    ]
    for use in uses:
        try_to(use)
    output.release("attempt")


def _uploader(output: OutputFolder) -> Uploader:
    return Uploader(output, RemoteFolder(FaultyStore(output.root)), policies=(), report=lambda event: None)


PLACES = [".safepoint", ".safepoint/work", ".safepoint/work/attempt", ".safepoint/work/attempt/checkpoint-6"]
DEEPER = [
    ".safepoint/work/attempt/checkpoint-6/rank-0",
    ".safepoint/work/attempt/checkpoint-6/rank-0/checkpoint-6",
    ".safepoint/work/attempt/checkpoint-6/merged",
]


@pytest.mark.parametrize("place", [*PLACES, *DEEPER])
def test_a_save(place: str, tmp_path: Path, other: Path) -> None:
    """Nothing of another run is deleted, moved into the checkpoint, or replaced."""
    output = prepared(tmp_path / "out")
    output.open_attempt("attempt")
    targets = {
        ".safepoint": other / ".safepoint",
        ".safepoint/work": other / ".safepoint/work",
        ".safepoint/work/attempt": other,
        ".safepoint/work/attempt/checkpoint-6": other / ".safepoint/work/attempt/checkpoint-7",
        ".safepoint/work/attempt/checkpoint-6/merged": other / "checkpoint-6",
    }
    working = written(output, 6)
    working.seal(1)
    swap(output.root / place, targets.get(place, other / "checkpoint-6"))
    for use in (
        lambda: working.seal(0),
        lambda: working.rank_root(2),
        lambda: working.commit([RankPart(rank=0)], describe(6)),
        lambda: write_files([], working.source),
        working.discard,
        lambda: output.release("attempt"),
    ):
        try_to(use)
    output.release("attempt")


@pytest.mark.parametrize("place", PLACES[:2])
def test_a_checkpoint_that_is_fetched(place: str, tmp_path: Path, other: Path) -> None:
    """Its files are created, which would make those of another run empty."""
    output = prepared(tmp_path / "out")
    (output.work / "resume").mkdir()
    (other / "resume").mkdir()
    (other / "resume" / "model.safetensors").write_text("of the other run")
    (other / ".safepoint" / "work" / "resume").symlink_to(other / "resume")
    swap(output.root / place, other if place == ".safepoint/work" else other / ".safepoint")
    try_to(lambda: create_files([ENTRY], output.work / "resume"))
    try_to(lambda: link_or_copy(other / "checkpoint-5" / MANIFEST_NAME, output.work / "resume" / "new"))
    assert (other / "resume" / "model.safetensors").read_text() == "of the other run"
    assert not (other / "resume" / "new").exists()
    (other / ".safepoint" / "work" / "resume").unlink()
    shutil.rmtree(other / "resume")


def test_a_committed_checkpoint_that_gets_more_files(tmp_path: Path, other: Path) -> None:
    """The manifest of another run's checkpoint stays."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 6)
    manifest = read_manifest(folder)
    swap(folder, other / "checkpoint-6")
    try_to(lambda: replace_record(folder, dataclasses.replace(manifest, run_id="another"), []))


def test_only_this_user_may_enter_the_working_folder(tmp_path: Path) -> None:
    """A framework saves there by path: no one else can put links below it. The checkpoint has the usual mode."""
    before = os.umask(0o002)
    try:
        output = prepared(tmp_path / "out")
        output.open_attempt("attempt")
        folder = commit(output, 3)
    finally:
        os.umask(before)
    assert (output.work / "attempt").stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o775
