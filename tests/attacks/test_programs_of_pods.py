"""Someone who may create or replace config maps, and not jobs or pods, changes what a pod runs.

Every program that Safepoint starts in a pod compares what it runs with the digest in the command.
"""

import base64
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import WaitTimeoutError
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest, PodBasis, config_maps, helper_job
from safepoint.jobs.cluster.manifests import SHIPPED_TO
from safepoint.jobs.cluster.pod_archive import module_command
from safepoint.jobs.cluster.state import Observed, describe
from safepoint.jobs.cluster.suspension import pod_requests, save_request
from safepoint.jobs.cluster.suspension.websocket import messages
from tests.attacks.test_objects_of_others import manifests

EVIL = "import sys; print('evil'); sys.exit(0)"


def placed(config_map: dict[str, Any], folder: Path) -> Path:
    for name, text in config_map["binaryData"].items():
        (folder / name).write_bytes(base64.b64decode(text))
    return folder


def ended(command: Sequence[str], place: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, *(str(folder) if part == place else part for part in command[1:])]
    own = {**os.environ, "TMPDIR": str(folder)}  # not the runs of other tests on this machine
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=own)


def command_of_suspend() -> list[str]:
    """What `suspend` starts in the first pod."""
    made = manifests()
    trainjob = {**made.trainjob, "metadata": {**made.trainjob["metadata"], "uid": "u"}}
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "node", "batch.kubernetes.io/job-completion-index": "0"}
    running = {"name": "node", "state": {"running": {"startedAt": "2026-11-23T10:00:00Z"}}}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": {"containerStatuses": [running]}}
    seen = Observed(trainjob=trainjob, pods=[pod])
    commands: list[list[str]] = []

    def record(api: Any, pod: str, container: str, command: Sequence[str], **limits: float) -> Any:
        commands.append(list(command))
        return iter([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pod_requests, "run_in_pod", record)
        patch.setattr(pod_requests, "is_training_pod", lambda pod: True)
        with pytest.raises(Exception, match="did not report which checkpoint"):
            _request(seen)
    return commands[0]


def _request(seen: Observed) -> None:
    request: Any = save_request.request_save
    request(None, describe(seen, place="c"), seen, within_s=1)


class TestSuspend:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return placed(dict(manifests().before)["configmaps"], tmp_path)

    def test_it_runs_what_was_submitted(self, folder: Path) -> None:
        done = ended(command_of_suspend(), SHIPPED_TO, folder)
        assert "`safepoint run`" in done.stdout, done

    @pytest.mark.parametrize("name", ["safepoint.pyz", "train.py", "safepoint.py", "json.py"])
    def test_it_runs_nothing_else(self, name: str, folder: Path) -> None:
        (folder / name).write_text(EVIL)
        done = ended(command_of_suspend(), SHIPPED_TO, folder)
        assert done.returncode == 1
        assert "has changed since the job was submitted" in done.stderr
        assert "evil" not in done.stdout

    @pytest.mark.parametrize(
        "command",
        [[], ["python3"], ["python3", "-P", "-c", "x", "/opt/safepoint", "x" * 64], ["a"] * 6, [1] * 6, [{}] * 9],
    )
    def test_a_job_without_a_digest(self, command: list[Any]) -> None:
        """The pods save at SIGTERM."""
        assert module_command(command, "m") is None


@pytest.mark.parametrize(
    "data", [b"\x89\x00", b"\x8a\x00", b"\x02\x00"], ids=["pings", "pongs", "no end of a message"]
)
def test_a_server_that_sends_no_message(data: bytes) -> None:
    """`suspend` does not wait for its answer without end."""

    class Endless:
        def __init__(self) -> None:
            self.first = True

        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            time.sleep(0.01)
            sent = data if self.first or data[0] != 2 else b"\x00\x00"
            self.first = False
            return sent

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            pass

    begun_s = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="did not end within"):
        list(messages(Endless(), idle_s=5, limit_s=0.5))
    assert time.monotonic() - begun_s < 5


class TestHelpers:
    REQUEST = HelperRequest(arguments=("--version",), claims=("ckpt",), is_read_only=True)

    @pytest.fixture
    def job(self) -> dict[str, Any]:
        basis = PodBasis(pod={}, container={"image": "i"}, image="i", origin="a runtime")
        return {**helper_job("h", self.REQUEST, basis), "metadata": {"name": "h", "uid": "u"}}

    def _command(self, job: dict[str, Any]) -> list[str]:
        return job["spec"]["template"]["spec"]["containers"][0]["command"]

    def test_it_runs_what_was_sent(self, job: dict[str, Any], tmp_path: Path) -> None:
        [sent] = config_maps(self.REQUEST, job)
        command = self._command(job)
        assert command[1] == "-P"  # otherwise modules are imported from where the archive is
        assert ended(command, "/opt/safepoint", placed(sent, tmp_path)).stdout.startswith("safepoint ")

    @pytest.mark.parametrize("name", [pod_archive.NAME, "zipimport.py", "sitecustomize.py"])
    def test_a_config_map_that_another_person_made_first(
        self, name: str, job: dict[str, Any], tmp_path: Path
    ) -> None:
        """Its name follows from that of the Job, which exists before. The pod has the claims and the keys."""
        [sent] = config_maps(self.REQUEST, job)
        (placed(sent, tmp_path) / name).write_text(EVIL)
        done = ended(self._command(job), "/opt/safepoint", tmp_path)
        assert done.returncode == 1
        assert "evil" not in done.stdout
        assert "has changed" in done.stderr
