"""An output folder of a stranger: links, second names and pipes where Safepoint has its own files."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.doctor.deadline import look_at_history
from safepoint.errors import StorageError
from safepoint.foundation.events.stream import append_lines
from safepoint.foundation.files import FolderLock, is_locked, read_lock_owner
from safepoint.foundation.shared_folders.leases import Lease, lease_on
from safepoint.progress.record import read_progress
from safepoint.snapshot.keeper.held_folder import HeldFolder, Reporter
from safepoint.training.engine.save_clock import read_losses
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint

FOLDERS = ["work", "trash"]
FILES = [
    *("lock", "keeper", "events.jsonl", "progress.json", "metrics.jsonl", "attempt.json", "location", "ended"),
    *("upload.json", "new"),
]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Files of somebody else, which are the same after the test."""
    folder = tmp_path / "outside"
    for name in ("12/data", "sub/7/data", f".x.{'0' * 32}/data", f".y.{'0' * 32}", "file"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of somebody else")
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def hostile(root: Path, name: str, outside: Path, kind: str) -> OutputFolder:
    """An output folder with a checkpoint, and something else in the place of one of Safepoint's own names."""
    output = prepared(root)
    commit(output, 4)
    place = output.root / name
    if place.is_dir():
        place.rename(output.root / "was-here")
    place.parent.mkdir(exist_ok=True)
    if kind == "link":
        place.symlink_to(outside if name.partition("/")[2] in ["", *FOLDERS] else outside / "file")
    elif kind == "dangling link":
        place.symlink_to(outside / "missing")
    elif kind == "file":
        place.write_text("a note")
    elif kind == "second name":
        os.link(outside / "file", place)
    else:
        os.mkfifo(place)
    return output


CASES = [
    *((".safepoint", kind) for kind in ("link", "dangling link", "pipe", "file")),
    *((f".safepoint/{name}", kind) for name in FOLDERS for kind in ("link", "dangling link", "pipe", "file")),
    *((f".safepoint/{name}", kind) for name in FILES for kind in ("link", "dangling link", "pipe")),
    (".safepoint/final", "link"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_folder_with_something_else_among_its_own_files_is_refused(
    name: str, kind: str, outside: Path, tmp_path: Path
) -> None:
    """The message names it, nothing is changed, and what reads only does not wait."""
    output = hostile(tmp_path / "out", name, outside, kind)
    other = prepared(tmp_path / "other")
    commit(other, 9)
    before = sorted(output.root.rglob("*"))
    for command in (
        ["checkpoints", "repair", output.root, "--drop-damaged"],
        ["checkpoints", "copy", other.root / "checkpoint-9", output.root],
    ):
        done = safepoint(*command)
        assert done.code == 13, done.stderr
        assert str(output.root / name) in done.stderr
        assert "Traceback" not in done.stderr
    with pytest.raises(StorageError, match=re.escape(str(output.root / name))):
        OutputFolder(output.root).prepare()  # as `run` and the ranks do
    assert safepoint("checkpoints", "list", output.root).code == 0
    assert safepoint("checkpoints", "verify", output.root).code == 0
    look_at_history(output.root)
    assert sorted(output.root.rglob("*")) == before


@pytest.mark.parametrize("name", [".safepoint", *(f".safepoint/{name}" for name in FOLDERS)])
def test_a_file_in_the_place_of_a_folder(name: str, outside: Path, tmp_path: Path) -> None:
    """The message does not call the file a link, and does not say that the output folder is not a folder."""
    output = hostile(tmp_path / "out", name, outside, "file")
    with pytest.raises(StorageError) as raised:
        output.prepare()
    assert raised.value.message == (
        f"{output.root / name} is a file, and Safepoint needs a folder with this name; nothing was changed"
    )
    assert (output.root / name).read_text() == "a note"


@pytest.mark.parametrize("name", FILES)
def test_a_second_name_of_a_file_of_somebody_else(name: str, outside: Path, tmp_path: Path) -> None:
    """Safepoint writes a file of its own, and what has the other name stays as it was."""
    output = hostile(tmp_path / "out", f".safepoint/{name}", outside, "second name")
    other = prepared(tmp_path / "other")
    commit(other, 9)
    assert safepoint("checkpoints", "copy", other.root / "checkpoint-9", output.root).code == 0
    assert safepoint("checkpoints", "repair", output.root).code == 0
    output.prepare()
    append_lines(output.control / name, b"lines\n")
    lock = FolderLock.acquire(output.control / name, {"pid": 1})
    assert lock is not None
    lock.release()


def test_a_backup_of_hard_links(tmp_path: Path) -> None:
    """`cp -al`: both folders can be read and written, and what is done to one does not change the other."""
    output = prepared(tmp_path / "out")
    commit(output, 4)
    append_lines(output.events, b"{}\n")
    lock = FolderLock.acquire(output.control / "lock", {"pid": 1})
    assert lock is not None
    backup = tmp_path / "backup"
    subprocess.run(["cp", "-al", output.root, backup], check=True)
    before = contents(backup)
    for command in ("list", "verify"):
        assert safepoint("checkpoints", command, backup).code == 0
    assert safepoint("checkpoints", "copy", backup / "checkpoint-4", tmp_path / "copy").code == 0
    with pytest.raises(BlockingIOError):
        FolderLock.acquire(output.control / "lock", {"pid": 2})
    lock.release()
    again = FolderLock.acquire(output.control / "lock", {"pid": 2})
    other = FolderLock.acquire(backup / ".safepoint" / "lock", {"pid": 3})
    assert again is not None
    assert other is not None
    for held in (output, OutputFolder(backup)):
        with pytest.raises(BlockingIOError):
            FolderLock.acquire(held.control / "lock", {"pid": 4})
    again.release()
    other.release()
    assert not OutputFolder(backup).is_in_use("checkpoint-4")
    before = contents(backup)
    output.prepare()
    commit(output, 5)
    append_lines(output.events, b"{}\n")
    assert safepoint("checkpoints", "prune", output.root, "--keep", "newest=1").code == 0
    assert contents(backup) == before
    assert safepoint("checkpoints", "verify", backup, "--deep").code == 0


def test_one_of_many_takes_a_lock_with_a_second_name(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"lock-{number}"
        path.write_bytes(b"old")
        os.link(path, tmp_path / f"backup-{number}")
        with ThreadPoolExecutor(8) as threads:
            taken = [one for one in threads.map(lambda _, path=path: try_lock(path), range(8)) if one is not None]
        assert len(taken) == 1
        taken[0].release()
        assert (tmp_path / f"backup-{number}").read_bytes() == b"old"


def try_lock(path: Path) -> FolderLock | None:
    with contextlib.suppress(BlockingIOError):
        return FolderLock.acquire(path, {"pid": 1})
    return None


def test_prune_refuses_it_too(outside: Path, tmp_path: Path) -> None:
    """The checkpoint stays, and is not moved to where the trash leads."""
    output = prepared(tmp_path / "out")
    commit(output, 3)
    commit(output, 4)
    output.trash.rmdir()
    output.trash.symlink_to(outside)
    done = safepoint("checkpoints", "prune", output.root, "--keep", "newest=1")
    assert done.code == 13, done.stderr
    assert (output.root / "checkpoint-3").is_dir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_each_file_by_itself_is_refused_or_ignored(kind: str, outside: Path, tmp_path: Path) -> None:
    """Also a process that has not looked at the whole folder changes nothing outside it, and does not wait."""
    output = hostile(tmp_path / "out", ".safepoint/file", outside, kind)
    path = output.control / "file"
    append_lines(path, b"lines\n")
    for _ in range(2):
        with pytest.raises(OSError, match="file"):
            FolderLock.acquire(path, {"pid": 1})
    assert read_progress(path) is None
    assert read_lock_owner(path) == {}
    assert not is_locked(path)
    assert lease_on(path) is Lease.NONE
    read_losses(path)


def test_the_keeper_deletes_only_in_its_own_folder(outside: Path, tmp_path: Path) -> None:
    """A link in the working folder is not followed to files that look unfinished."""
    output = prepared(tmp_path / "out")
    (output.work / "attempt").symlink_to(outside / "sub")
    (output.work / "other").symlink_to(outside)
    (output.work / "mine/12").mkdir(parents=True)
    folder = HeldFolder(Reporter(0, None))
    folder.open(output.root, is_committer=True)
    folder.close()
    assert not (output.work / "mine/12").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("record", [MANIFEST_NAME, "model.safetensors"])
def test_a_pipe_in_a_checkpoint_does_not_stop_a_command(record: str, tmp_path: Path) -> None:
    """It is found, and no command waits for a writer."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 4)
    commit(output, 3)
    (folder / record).unlink()
    os.mkfifo(folder / record)
    assert safepoint("checkpoints", "list", output.root).code == 0
    assert safepoint("checkpoints", "verify", output.root).code == (0 if record == MANIFEST_NAME else 14)  # foreign
    assert safepoint("checkpoints", "prune", output.root, "--keep", "newest=1").code in {0, 3}
    assert not output.is_in_use("checkpoint-4")
    target = tmp_path / "copy"
    assert safepoint("checkpoints", "copy", output.root / "checkpoint-4", target).code != 0
    assert safepoint("checkpoints", "repair", output.root).code in {0, 14}


def test_a_checkpoint_that_is_a_link_is_left_where_it_leads(outside: Path, tmp_path: Path) -> None:
    """A commit under its name replaces the link; `repair` and `prune` do not go through it."""
    output = prepared(tmp_path / "out")
    (output.root / "checkpoint-4").symlink_to(outside)
    (output.root / "final").symlink_to(outside)
    for command in (["repair", output.root, "--drop-damaged"], ["prune", output.root, "--keep", "newest=1"]):
        assert safepoint("checkpoints", *command).code in {0, 14}
    commit(output, 4)
    assert (output.root / "checkpoint-4").is_dir()
    assert not (output.root / "checkpoint-4").is_symlink()


def test_a_folder_that_is_a_link_itself_may_be_used(tmp_path: Path) -> None:
    """People link `out` to a large disk: what they name is theirs."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    commit(prepared(tmp_path / "out"), 4)
    assert safepoint("checkpoints", "repair", tmp_path / "out").code == 0
    assert (tmp_path / "disk/checkpoint-4").is_dir()


def test_run_refuses_it(outside: Path, tmp_path: Path) -> None:
    """The command ends before it starts a rank."""
    output = hostile(tmp_path / "out", ".safepoint/events.jsonl", outside, "link")
    command = [sys.executable, "-m", "safepoint.cli.main", "run", "--output-dir", output.root, "-m", "this"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 13, done.stderr
    assert "events.jsonl" in done.stderr
    assert "Beautiful" not in done.stdout


def test_names_and_texts_of_strangers_do_not_reach_the_terminal(outside: Path, tmp_path: Path) -> None:
    """What moves a cursor is escaped in the message about a file, and about the holder of a lock."""
    output = prepared(tmp_path / "out")
    holder = FolderLock.acquire(output.control / "lock", {"pid": "\x1b[2J", "host": "\x1b]0;x\x07", "since": "\r"})
    assert holder is not None
    refused = safepoint("checkpoints", "repair", output.root)
    holder.release()
    (output.control / "\x1b[31mred\n").symlink_to(outside)
    found = safepoint("checkpoints", "repair", output.root)
    assert (refused.code, found.code) == (11, 13)
    for text in (refused.stderr, found.stderr):
        assert text.rstrip("\n").isprintable()
