"""SIGKILL at random moments of save, commit, upload, prune and start."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.remote.fetch import check_listing, create_files, fetch, windows_of
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from tests.programs.writer import KEEP, check
from tests.support.patience import PATIENCE
from tests.support.s3_server import S3Server

_KILLS = int(os.environ.get("SAFEPOINT_TEST_KILLS", "12"))
_WRITER = Path(__file__).parent.parent / "programs" / "writer.py"


class Run:
    """Writers that follow each other in one location."""

    def __init__(self, server: S3Server, folder: Path) -> None:
        self.folder = folder
        self.local = folder / "local"
        self.location = server.location(f"kills/{uuid.uuid4().hex}")
        self.store = open_store(self.location, StorageOptions.from_environment(server.variables))
        self.remote = RemoteFolder(self.store)
        self.variables = server.variables
        self.num_local = 0
        self.uploaded = 0

    def trial(self, attempt: int, dice: random.Random) -> str:
        """Start a writer, kill it after a random time, and return what it printed."""
        log = self.folder / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, str(_WRITER), str(self.local), str(self.location), str(attempt)],
                env={**os.environ, **self.variables},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        # A third of them before or while it begins, the others while it commits, prunes and uploads.
        if dice.random() < 0.33:
            time.sleep(dice.uniform(0.1, 1.2))
        else:
            deadline = time.monotonic() + 60 * PATIENCE
            while b"began" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
            time.sleep(dice.uniform(0.0, 2.5))
        uploaders = _children(process.pid)
        assert process.poll() is None, log.read_text()
        for pid in (process.pid, *uploaders):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        return log.read_text()

    def check_stands(self, text: str) -> None:
        """All checkpoints are complete, and there are as many as the policy keeps."""
        assert "rejected" not in text, text
        self.num_local += len(_numbers(text, "committed")) + len(_numbers(text, "fetched"))
        valid = [path for path in list_checkpoints(self.local) if verify(path).is_valid]
        for path in valid:
            check(path, int(path.name.split("-")[1]))
        assert len(valid) == len(list_checkpoints(self.local)), "a folder with a checkpoint's name is not one"
        assert len(valid) >= min(KEEP, self.num_local), text
        steps = self.remote.steps()
        for step in steps:
            self.check_remote(step)
        assert steps[:1] >= [self.uploaded] if self.uploaded else True
        self.uploaded = max([self.uploaded, *steps])

    def check_remote(self, step: int) -> None:
        manifest = self.remote.manifest(step)
        check_listing(self.store, checkpoint_name(step), manifest)
        working = self.folder / "check"
        shutil.rmtree(working, ignore_errors=True)
        create_files(manifest.files, working)
        fetch(self.store, checkpoint_name(step), windows_of(manifest.files), working)
        check(working, step)

    def check_nothing_is_left(self) -> None:
        """What killed writers left is deleted after a start that began its own work."""
        control = self.local / ".safepoint"
        assert list((control / "trash").iterdir()) == []
        assert len(list((control / "work").iterdir())) <= 1, "only the last attempt's own working folder"
        held = {path.name for path in list_checkpoints(self.local)}
        complete = {checkpoint_name(step) for step in self.remote.steps()}
        folders = {item.key.partition("/")[0] for item in self.store.list()}
        assert folders <= held | complete | {".safepoint"}


def _numbers(text: str, word: str) -> list[int]:
    return [int(number) for number in re.findall(rf"^{word} (\d+)$", text, re.MULTILINE)]


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += [int(child) for child in path.read_text().split()]
    return pids


@pytest.mark.timeout(60 + 20 * _KILLS)
def test_kills_at_random_moments(server: S3Server, tmp_path: Path) -> None:
    """No resume uses an incomplete checkpoint, retention holds, and the next start leaves nothing behind."""
    seed = int(os.environ.get("SAFEPOINT_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"SAFEPOINT_TEST_SEED={seed}")
    dice = random.Random(seed)
    run = Run(server, tmp_path)
    for attempt in range(1, _KILLS + 1):
        text = run.trial(attempt, dice)
        run.check_stands(text)
        if dice.random() < 0.1 and run.uploaded:
            shutil.rmtree(run.local, ignore_errors=True)
            run.num_local = 0
    # One start that is left alone until it has begun, and killed when it has: its own work is all that may be there.
    dice = random.Random(0)
    dice.random()
    _finish(run, _KILLS + 1)
    run.check_nothing_is_left()
    print(f"{_KILLS} kills, {run.uploaded} the newest step in the store")


def _finish(run: Run, attempt: int) -> None:
    """Start a writer that ends after it has cleaned up."""
    process = subprocess.Popen(
        [sys.executable, str(_WRITER), str(run.local), str(run.location), str(attempt)],
        env={**os.environ, **run.variables},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("cleaned"):
            os.kill(process.pid, signal.SIGSTOP)
            break
    for pid in (*_children(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
