"""The uploader as a process: it ignores signals, is restarted when it dies, and reports the result at the end."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan
from safepoint.foundation import clock
from safepoint.foundation.events.stream import Event
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from safepoint.training.context import uploads as uploads_module
from safepoint.training.context.uploads import Uploader
from tests.support.checkpoints import commit, keep_final, prepared
from tests.support.contexts import rank_context
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.timeout(60)


class Scene:
    """A folder with one checkpoint, and a store that is another folder."""

    def __init__(self, root: Path) -> None:
        self.output: OutputFolder = prepared(root / "local")
        commit(self.output, 10)
        self.upload_status = self.output.control / "upload.json"
        self.bucket = root / "bucket"
        self.remote = RemoteFolder(LocalStore(Location(scheme=Scheme.FILE, path=str(self.bucket))))
        self.remote.claim(Claim(run_id="run", attempt=1, attempt_id="run-1", since="now", host="here"))

    def start(self, location: str | None = None) -> Uploader:
        where = location or str(self.bucket)
        return Uploader(UploaderPlan(folder=str(self.output.root), location=where, attempt_id="run-1"))

    def wait_for(self, step: int) -> None:
        deadline_s = clock.monotonic_s() + 20 * PATIENCE
        while step not in self.remote.steps():
            assert clock.monotonic_s() < deadline_s
            time.sleep(0.02)

    def wait_for_failing(self, name: str) -> None:
        """Wait until the uploader reports that the upload of `name` has failed."""
        deadline_s = clock.monotonic_s() + 20 * PATIENCE
        while (self.status().get("state"), self.status().get("name")) != ("failing", name):
            assert clock.monotonic_s() < deadline_s
            time.sleep(0.02)

    def status(self) -> dict[str, object]:
        """The last status that the uploader wrote, empty before it wrote one."""
        return json.loads(self.upload_status.read_bytes()) if self.upload_status.exists() else {}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def uploader_pid() -> int:
    """The process that this one has started and not yet waited for."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()[-1])


def test_signals_to_the_whole_job_do_not_end_it(scene: Scene) -> None:
    """SIGTERM, SIGINT and SIGHUP; only a request to finish ends it."""
    uploads = scene.start()
    scene.wait_for(10)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(uploader_pid(), number)
    commit(scene.output, 20)
    scene.wait_for(20)
    assert uploads.finish(newest_only=False, deadline_s=None)


def test_one_that_died_is_started_for_the_end(scene: Scene) -> None:
    """Also when no caller has checked since."""
    uploads = scene.start()
    scene.wait_for(10)
    pid = uploader_pid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and who started it is left to find that out
    commit(scene.output, 20)
    assert uploads.finish(newest_only=True, deadline_s=clock.monotonic_s() + 20 * PATIENCE)
    assert scene.remote.steps() == [20, 10]


def test_the_status_of_an_earlier_one_does_not_count(scene: Scene) -> None:
    """An error of last week does not stop the run of today."""
    scene.upload_status.write_text(json.dumps({"error": "expired"}))
    uploads = scene.start()
    assert uploads.failure() is None
    assert uploads.finish(newest_only=False, deadline_s=None)


def test_a_stop_during_the_last_uploads_is_no_success(scene: Scene) -> None:
    """Both waiting calls return that not everything was uploaded: the final model was left out."""
    (keep_final(scene.output, model_safetensors=b"weights") / "model.safetensors").unlink()
    uploads = scene.start()
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(uploads.finish(newest_only=False, deadline_s=None)))
    waiting.start()
    scene.wait_for_failing("final")  # the final model is tried only on request
    results.append(uploads.finish(newest_only=True, deadline_s=clock.monotonic_s() + 20 * PATIENCE))
    waiting.join(20)
    assert scene.remote.steps() == [10]
    assert results == [False, False]


def test_a_file_that_vanished_does_not_end_the_uploader(scene: Scene) -> None:
    """That checkpoint fails and is reported; the next one is uploaded."""
    (scene.output.root / "checkpoint-10" / "model.safetensors").unlink()
    uploads = scene.start()
    deadline_s = clock.monotonic_s() + 20 * PATIENCE
    while (failure := uploads.failure()) is None:
        assert clock.monotonic_s() < deadline_s
        time.sleep(0.05)
    assert "model.safetensors" in failure
    commit(scene.output, 20)
    scene.wait_for(20)
    assert uploads.finish(newest_only=True, deadline_s=clock.monotonic_s() + 20 * PATIENCE)


@pytest.mark.parametrize("newest_only", [True, False])
def test_a_report_names_what_was_requested(newest_only: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a later request is for less."""
    monkeypatch.setattr(uploads_module, "_start", lambda plan: subprocess.Popen(["false"], stdin=subprocess.PIPE))
    reported: list[Event] = []
    context = rank_context(reported=reported)
    context.uploads.uploader = scene.start()
    for repeated in (newest_only, True):
        assert not context.uploads.finish(newest_only=repeated)
    assert ["the newest checkpoint was not uploaded" in event.line for event in reported] == [newest_only] * 2
    assert ["a checkpoint, the final model or another file" in event.line for event in reported] == [
        not newest_only
    ] * 2
